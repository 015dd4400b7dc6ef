"""What lives for one forward and its backward, and how it ends.

[Note: iteration] An iteration goes through the stages of one table. It ends in one operation (`close`), whether its
forward failed, or its backward came to its end, will be differentiated again, or failed: what was issued is waited for,
units are brought to rest, and gradients are published or dropped. A backward that dies does so where an exception is
being raised, maybe on another thread: then `.grad` is put back at once (`fail_backward`), and the rest waits for the
next call.
"""

from __future__ import annotations

import enum
import functools
import sys
from collections.abc import Mapping, Sequence

import torch

from ...errors import InternalError, is_new
from ..agreement.agreement import Agreement
from ..agreement.once_per_job import warn_once_per_job
from ..base import _torch
from ..base import autograd as hooks
from ..base.events import Observers
from ..flat.deferred_grad import PendingGradients
from ..flat.states import FORWARD as UNIT_FORWARD
from ..flat.states import GATHERING, SUMMONED
from ..flat.states import IDLE as UNIT_IDLE
from ..flat.views import SHOWS_SHARD, check_left
from ..schedule.forward_record import ForwardRecord
from .backward import Backward
from .finish import Finisher
from .grad_accumulators import GradAccumulators
from .resources import Resources
from .turns import PLAIN
from .unit import Unit
from .unit_state import UnitBackward
from .user_hooks import run_user_hooks
from .user_writes import check_left_unsharded, retire_request


class Stage(enum.Enum):
    """Where an iteration is."""

    __hash__ = object.__hash__  # members are singletons; enum's own hash is Python code on the way of every step

    IDLE = "idle"
    FORWARD = "forward"  # a forward runs; evaluations too
    AWAITING_BACKWARD = "awaiting its backward"
    BACKWARD = "backward"
    RETAINED = "retained"  # a backward has ended that will be differentiated again; units are still unsharded for it
    FAILED = "failed"  # a backward died, and what it left has not been brought to rest


IDLE, FORWARD, AWAITING_BACKWARD, BACKWARD, RETAINED, FAILED = Stage
INTERRUPTED = frozenset({AWAITING_BACKWARD, BACKWARD, RETAINED, FAILED})
LEFT_BEHIND = frozenset({BACKWARD, RETAINED, FAILED})  # that a next call may find, and brings to rest

STAGE_STEPS: Mapping[Stage, frozenset[Stage]] = {
    # A backward may come of a graph that is older than the last rest.
    IDLE: frozenset({IDLE, FORWARD, BACKWARD}),
    # A gradient may be taken inside a forward. One that was refused before it ran is followed by another.
    FORWARD: frozenset({FORWARD, IDLE, AWAITING_BACKWARD, BACKWARD}),
    AWAITING_BACKWARD: frozenset({AWAITING_BACKWARD, IDLE, FORWARD, BACKWARD}),
    BACKWARD: frozenset({IDLE, FORWARD, AWAITING_BACKWARD, RETAINED, FAILED}),
    RETAINED: frozenset({IDLE, FORWARD, AWAITING_BACKWARD, BACKWARD, FAILED}),
    FAILED: frozenset({IDLE, FORWARD, AWAITING_BACKWARD, FAILED}),
}


class Outcome(enum.Enum):
    """How it ended."""

    ABANDONED = "abandoned"  # a forward failed
    ENDED = "ended"
    RETAINED = "retained"
    FAILED = "failed"


class Iteration:
    """One forward, or several, and the backward over them. A model has one object for all of its iterations, whose
    record and stage are new with each.

    Attributes:
        stage: where it is.
        record: the forward passes that the next backward may cover.
        backward: the one that runs; None without.
        depth: forwards of units that run, one in the other.
        ahead: units gathered in this forward before their use, or because a user asked for them.
        requested: units that users unsharded, who may compute with parameters outside of a forward.
        is_at_rest: shards may be written to, so the next gathers come after what was.
        has_freed: whether the forward that runs, or ran last, has freed a unit, which its backward gathers again.
        training: whether the running forward has a backward; inside a reentrant checkpoint, too.
        turns: when it is a unit's turn in it. [Note: turns]
        pending: gradients of the last backward that are reduced still. [Note: deferred gradients]
        left_unreduced: the last backward that was to reduce gradients brought none on any rank. [Note: left unreduced]
    """

    def __init__(
        self,
        units: Sequence[Unit],
        resources: Resources,
        agreement: Agreement,
        accumulators: GradAccumulators,
        observers: Observers,
    ) -> None:
        """`units`: of the model, in a list that is its own."""
        self.stage = IDLE
        self.record: ForwardRecord[Unit] = ForwardRecord()
        self.backward: Backward | None = None
        self.depth = 0
        self.ahead: dict[Unit, None] = {}
        self.requested: dict[Unit, None] = {}
        self.is_at_rest = True
        self.has_freed = self.training = self.left_unreduced = False
        self.turns = PLAIN
        self.pending: PendingGradients | None = None
        self._units = units
        self._resources = resources
        self._agreement = agreement
        self._accumulators = accumulators
        self._observers = observers

    def enter(self, stage: Stage) -> None:
        """Change the stage, by the table."""
        if stage not in STAGE_STEPS[self.stage]:
            story = "; ".join(map(str, self._resources.events.tail()))
            raise InternalError(
                f"an iteration that is {self.stage.value} cannot become {stage.value}. Last events: {story}"
            )
        self.stage = stage

    @property
    def in_forward(self) -> bool:
        """Whether a forward of any unit runs."""
        return self.depth > 0

    @property
    def awaits_backward(self) -> bool:
        """Whether units ran with a graph, and no backward has begun since."""
        return not (self.record.consumed or self.record.empty)

    @property
    def is_interrupted(self) -> bool:
        """Whether a forward awaits its backward, or a backward runs, or was left as it was."""
        return self.stage in INTERRUPTED or (self.stage is FORWARD and self.awaits_backward)

    # -- forwards ----------------------------------------------------------------------------------------------------

    def begin_forward(self) -> None:
        """The outermost forward begins, with what was written to the shards at rest."""
        if FORWARD not in STAGE_STEPS[self.stage]:
            self.enter(FORWARD)  # refuses it
        self.stage = FORWARD  # without a call, which each step would take
        self.record.begin()
        self._resources.streams.unshard.follow_compute()
        self.is_at_rest = self.has_freed = False

    def end_forward(self, *, empty: bool) -> None:
        """The outermost forward has ended; `empty`: no backward can follow. What a backward inside of it has left is
        still to be finished."""
        if self.stage is FORWARD:
            self.enter(IDLE if empty else AWAITING_BACKWARD)
            if not (empty or self.has_freed) and self._units[-1].groups.shard.size > 1:
                for transport in self._resources.resting:  # the backward gathers nothing
                    transport.rest()
        for each in self.ahead:
            _reshard_unused(each)
        self.ahead.clear()

    def _forget_forward(self) -> None:
        """A forward failed: all is as if it had not begun."""
        self._agreement.abandon(sys.exc_info()[1])
        self.record = ForwardRecord(knows_late=self.record.asks_late)
        self.is_at_rest = True
        self.ahead.clear()
        self.requested.clear()

    def follow_writes(self) -> None:
        """Order the next gathers after what was written to the shards at rest, by an optimizer, for example."""
        self._resources.streams.unshard.follow_compute()
        self.is_at_rest = False

    # -- backwards ---------------------------------------------------------------------------------------------------

    def follow_requests(self) -> None:
        """What users unsharded and no forward entered takes part in the backward: they computed with it themselves."""
        for unit in self.requested:
            if unit.is_unsharded and not unit.backward.keep_unsharded and unit not in self.record.entered:
                self.record.add(unit)
                unit.backward.keep_unsharded = True
        self.requested.clear()

    def begin_backward(self, backward: Backward) -> None:
        """The `backward` runs, and ends with the graph task."""
        self.backward = backward
        self.enter(BACKWARD)
        backward.double = torch.is_grad_enabled()
        # Bound to this backward: on an accelerator a failed one may be let go late, by another thread.
        ended, failed = self.end_backward, self.fail_backward
        hooks.at_end_of_backward(functools.partial(ended, backward), functools.partial(failed, backward))

    def run_without_graph(self, backward: Backward) -> None:
        """The `backward` has no graph: it reduces what earlier ones have left, and ends. Collective."""
        self.backward = backward
        self.enter(BACKWARD)
        try:
            self.end_backward(backward)
        except BaseException:
            self.fail_backward(backward)
            raise

    def end_backward(self, backward: Backward) -> None:
        """The graph task has ended: flush, and return to between iterations. Collective."""
        if self.backward is not backward:
            return
        try:
            backward.flush()
            if backward.sync:
                self.left_unreduced = not backward.gradient_has_arrived
            for observe in self._observers.backward_ends:
                observe()
            if not backward.double:
                self._check_unreached()
            self.backward = None
            self.close(Outcome.RETAINED if backward.double else Outcome.ENDED, backward)
        except BaseException as error:
            if self.backward is None:  # what failed comes too late for `fail_backward`
                if self.stage is BACKWARD:
                    self.enter(FAILED)
                backward.finisher.backward_failed(self._units)
            if isinstance(error, RuntimeError):
                self._agreement.explain(error)
            raise

    def _check_unreached(self) -> None:
        """Refuse what was written to units that the backward, which is over, has not reached."""
        for unit in self._units:
            for views in unit.views:
                if views.tracks_writes or views.is_left_unsharded:
                    check_left(views)

    def fail_backward(self, backward: Backward) -> None:
        """The graph task died: `.grad` is as before at once; the rest waits for the next call (`close`)."""
        if self.backward is not backward:
            return
        self.backward = None
        self.enter(FAILED)
        self._name_used_at_rest()
        self._stop_sharing()
        backward.finisher.backward_failed(self._units)
        self._agreement.publish_abandoned(None)
        self._agreement.rest()
        lost = [unit.label for unit in self._units if _rollback(unit)]
        if lost:
            warn_once_per_job(
                "a backward failed inside an accumulation window: the unsharded gradients of earlier microbatches are "
                f"dropped with it ({len(lost)} units, "
                f"first {lost[0]}). Run the window again from its first microbatch",
                names_rank=True,
            )

    def _name_used_at_rest(self) -> None:
        """A backward failed: name the parameters that it cannot bring gradients to, where autograd does not."""
        for unit in self.record.entered:
            used = [name for views in unit.views for name in views.used_at_rest() if unit.phase is not SUMMONED]
            if used:
                warn_once_per_job(
                    f"a backward failed that brings gradients to {', '.join(map(repr, used))} of unit {unit.label}: "
                    "before the forward, where parameters show this rank's shard, something was computed with them "
                    "that autograd has recorded and that is still there. Compute terms over parameters (for example an "
                    "L2 penalty) inside the forward of the module that holds them, or under torch.no_grad()",
                    names_rank=True,
                )

    def _stop_sharing(self) -> None:
        """A backward failed: units where gradients were taking the parameters' places do without from now on."""
        sharing = [unit for unit in self._units if any([grads.occupies_params for grads in unit.grads])]
        if not sharing:
            return
        if is_new("failed sharing", of=self):
            warn_once_per_job(
                f"a backward failed in unit {sharing[0].label}, while gradients took the places of its parameters. If "
                "autograd complained of a variable that was modified by an inplace operation, a parameter is read "
                "after its gradient has come (for example a detached use): run the step again; in units of this class "
                "gradients have memory of their own from now on",
                names_rank=True,
            )
        classes = {unit.entries.class_name for unit in sharing}
        for unit in self._units:
            if unit.entries.class_name in classes:
                unit.leaves.single_use = False

    def _drop_gradients(self) -> None:
        """Drop what a failed backward has reduced, and name what that loses. [Note: error feedback]"""
        if owing := [unit.label for unit in self._units if any([grads.owes_dropped for grads in unit.grads])]:
            warn_once_per_job(
                f"a backward failed after gradients had been reduced with error feedback ({len(owing)} units, first "
                f"{owing[0]}). They are dropped, and so is what quantized gradients of these units have lost: it "
                "begins at zero again",
                names_rank=True,
            )
        for unit in self._units:
            for grads in unit.grads:
                grads.drop()

    # -- ends --------------------------------------------------------------------------------------------------------

    def close(self, outcome: Outcome, backward: Backward | None = None) -> None:
        """A forward failed, the `backward` has come to its end, or what a former one left is brought to rest. Waits for
        what was issued; no collective. Units whose forward runs, with the backward inside, go on with it."""
        units = [unit for unit in self._units if unit.phase is not UNIT_FORWARD] if self.depth else self._units
        for unit in self._units if self.depth else ():
            if unit not in units:
                _rollback(unit)  # its `.grad` is there again
                unit.wait_unshard()
        rest = self._agreement.resume_forward if self.depth else self._agreement.rest
        if outcome is Outcome.RETAINED:
            for unit in units:
                _retain(unit)
            rest()
            self.enter(RETAINED)
            return
        if outcome is not Outcome.ENDED:
            failed = outcome is Outcome.FAILED
            self._drop_gradients() if failed else self._forget_forward()
            for unit in self._units:
                unit.reset_to_idle()
            self._resources.limiter.free_all()
            if not failed:
                rest()
            if failed or self.stage not in LEFT_BEHIND:  # else a backward inside failed, which the next call closes
                self.enter(FORWARD if self.depth else AWAITING_BACKWARD if self.awaits_backward else IDLE)
            return
        kept = backward.stays_unsharded if backward is not None else frozenset()
        self.is_at_rest = not self.depth
        for unit in units:
            unit.reset_to_idle(keep_unsharded=unit in kept)
        self._resources.streams.await_downloads()
        finisher = backward.finisher if backward is not None else Finisher()
        finished = finisher.backward_ended(units, backward.deferred if backward is not None else ())
        self.pending = finisher.pending
        self._resources.limiter.free_all()
        self.enter(FORWARD if self.depth else IDLE)
        rest()
        self._resources.events.append(("end", "", UNIT_IDLE.value))
        for unit, complete in finished:
            run_user_hooks(unit, complete)
            if self._accumulators.expects_gradients:
                self._accumulators.run(complete)
        if backward is not None:
            for observe in self._observers.backward_ended:
                observe(backward)

    def finish_interrupted(self) -> None:
        """Bring what a failed or a double backward left behind to rest."""
        if self.stage in LEFT_BEHIND and not self.clear_failure() and self.stage is RETAINED:
            self.close(Outcome.ENDED)

    def clear_failure(self) -> bool:
        """Bring what a failed backward left behind to rest, if one failed; waits for what it had issued."""
        if self.backward is not None and not _torch.in_backward():
            self.fail_backward(self.backward)  # autograd has not let it go yet
        if self.stage is not FAILED:
            return False
        self.close(Outcome.FAILED)
        return True

    def wait_for_gradients(self) -> None:
        """Wait for what the last backward left to be reduced, if it did."""
        if self.pending is not None:
            awaited, self.pending = self.pending, None
            awaited.wait()

    def __del__(self) -> None:
        if self._resources.device.has_streams:  # whose memory would go back while a stream writes to it, or reads it
            self.wait_for_gradients()
            if self._resources.tracker.live["unsharded"]:
                self._resources.streams.unshard.follow_compute()

    def retire_requests(self, *, written: bool = False) -> None:
        """Look after what users unsharded between iterations."""
        for unit in self.ahead:
            retire_request(unit, written=written)

    @property
    def shows_shards(self) -> bool:
        """Whether everything is as between iterations, nothing unsharded by users, and no window left unreduced."""
        return not (self.ahead or self.is_interrupted or self.left_unreduced)

    def show_shards(self) -> None:
        """An optimizer is about to step: parameters show their shards, and gradients are there."""
        self.wait_for_gradients()
        if self.is_interrupted:
            self.reset_to_idle()
        elif not self.in_forward:
            self.retire_requests(written=True)

    def reset_to_idle(self) -> None:
        """Shards are about to be written to: parameters show them. A backward that still comes gathers again."""
        self.wait_for_gradients()
        self.finish_interrupted()
        if self.is_at_rest:
            self.retire_requests(written=True)
        try:
            for unit in self._units:
                check_left_unsharded(unit)
        finally:
            for unit in self._units:
                unit.reset_to_idle()
            self._resources.limiter.free_all()
            self.is_at_rest = True


def _reshard_unused(unit: Unit) -> None:
    """Free what was gathered ahead of a forward that did not come to it."""
    unused = [handle for handle in unit.handles if handle.state is GATHERING]
    for handle in unused:
        handle.wait_unshard()
        unit.resources.free(handle)
    if unused:
        unit.record_event("reshard")


def _retain(unit: Unit) -> None:
    """A backward that will be differentiated again has ended: parameters stay unsharded, gradients in flight."""
    unit.phase = UNIT_IDLE
    unit.leaves.listing.show(False)
    for grads in unit.grads:
        grads.retain_for_double_backward()
    unit.track_writes()
    unit.backward = UnitBackward(keep_unsharded=unit.backward.keep_unsharded)


def _rollback(unit: Unit) -> bool:
    """After a failed backward, at once: leaves show the shard, `.grad` is what it was. True if a window was lost.

    Called during exception handling: must not block or communicate.
    """
    unit.backward.forget_graph()
    unit.leaves.listing.show(False)
    if unit.phase is not SUMMONED:  # else the parameters are the user's, and the backward did not reach them
        for views in unit.views:
            views.show(SHOWS_SHARD)
        for grads in unit.grads:
            grads.unstash_grads()
    return any(grads.accumulation.window_open for grads in unit.grads)
