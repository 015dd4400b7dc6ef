"""The state of one forward and its backward, and the operation that ends it.

[Note: iteration] An iteration goes through the stages of one table. It ends in one operation (`close`), whether its
forward failed, or its backward has ended, will be differentiated again, or failed: issued collectives are awaited,
units are brought to rest, and gradients are published or dropped. A backward fails while an exception is being raised,
possibly on another thread: then `.grad` is restored immediately (`fail_backward`), and the next call does everything
else. A forward without a backward, as in evaluation, leaves gradients alone, also those that are still in flight, and
the graph of an earlier forward: the driver only brings its units to rest (`ForwardDriver._end`).
"""

from __future__ import annotations

import enum
import functools
import sys
from collections.abc import Mapping, Sequence

import torch

from ...errors import InternalError, is_new
from ..base import _torch
from ..base import autograd as hooks
from ..base.events import Observers
from ..base.peers import Peers
from ..device.streams import Work
from ..flat.states import FORWARD as UNIT_FORWARD
from ..flat.states import GATHERING, SUMMONED, Left
from ..flat.states import IDLE as UNIT_IDLE
from ..flat.views import SHOWS_SHARD
from ..schedule.forward_schedule import ForwardRecord
from .backward import Backward
from .executor import Executor
from .finish import Finisher
from .resources import Resources
from .turns import PLAIN
from .unit import Unit
from .unit_state import UnitBackward


class Stage(enum.Enum):
    """The stages of an iteration."""

    __hash__ = object.__hash__  # members are singletons; enum's own hash would be a Python call in every step

    IDLE = "idle"
    FORWARD = "forward"  # a forward runs; evaluations too
    AWAITING_BACKWARD = "awaiting its backward"
    BACKWARD = "backward"
    RETAINED = "retained"  # a backward has ended that will be differentiated again; units are still unsharded for it
    FAILED = "failed"  # a backward failed, and its units have not been brought to rest


IDLE, FORWARD, AWAITING_BACKWARD, BACKWARD, RETAINED, FAILED = Stage
INTERRUPTED = frozenset({AWAITING_BACKWARD, BACKWARD, RETAINED, FAILED})
LEFT_BEHIND = frozenset({BACKWARD, RETAINED, FAILED})  # that the next call may find, and ends
ENDED_BADLY = frozenset({BACKWARD, FAILED})  # that a forward may find around a backward, and ends

STAGE_STEPS: Mapping[Stage, frozenset[Stage]] = {
    # A backward may be of a graph that is older than the last rest.
    IDLE: frozenset({IDLE, FORWARD, BACKWARD}),
    # A backward may run inside a forward. A forward that was refused before it ran is followed by another.
    FORWARD: frozenset({FORWARD, IDLE, AWAITING_BACKWARD, BACKWARD}),
    AWAITING_BACKWARD: frozenset({AWAITING_BACKWARD, IDLE, FORWARD, BACKWARD}),
    BACKWARD: frozenset({IDLE, FORWARD, AWAITING_BACKWARD, RETAINED, FAILED}),
    RETAINED: frozenset({IDLE, FORWARD, AWAITING_BACKWARD, BACKWARD, FAILED}),
    FAILED: frozenset({IDLE, FORWARD, AWAITING_BACKWARD, FAILED}),
}


class Outcome(enum.Enum):
    """How an iteration has ended."""

    ABANDONED = "abandoned"  # a forward failed
    ENDED = "ended"
    RETAINED = "retained"
    FAILED = "failed"


class Iteration:
    """One forward, or several, and the backward over them. A model has one object for all of its iterations, whose
    record and stage are new with each.

    Attributes:
        stage: the present one.
        record: the forward passes that the next backward may cover.
        backward: the running one, or None.
        depth: the number of nested forwards of units that run.
        executor: of the actions of its forwards and its backward.
        requested: units that a user unsharded, and may compute with outside of a forward.
        is_at_rest: shards may be written to, so the next gathers are ordered after these writes.
        training: whether a backward follows the running forward; inside a reentrant checkpoint, too.
        turns: of units in the forward. [Note: turns]
        pending: gradients of the last backward that are still being reduced. [Note: finishers]
        left_unreduced: the last backward with reductions computed no gradient on any rank. [Note: left unreduced]
    """

    def __init__(
        self,
        units: Sequence[Unit],
        resources: Resources,
        agreement: Peers,
        observers: Observers,
        executor: Executor,
    ) -> None:
        """`units`: the list of the model itself, which may change."""
        self.stage = IDLE
        self.record: ForwardRecord[Unit] = ForwardRecord()
        self.backward: Backward | None = None
        self.depth = 0
        self.executor = executor
        self.requested: dict[Unit, None] = {}
        self.is_at_rest = True
        self.training = self.left_unreduced = False
        self.turns = PLAIN
        self.pending: Work | None = None
        self._units = units
        self._resources = resources
        self._agreement = agreement
        self._observers = observers

    def enter(self, stage: Stage) -> None:
        """Change the stage, as the table allows."""
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
        """Whether a forward awaits its backward, or a backward runs, or was not closed."""
        return self.stage in INTERRUPTED or (self.stage is FORWARD and self.awaits_backward)

    # -- forwards ----------------------------------------------------------------------------------------------------

    def begin_forward(self) -> None:
        """The outermost forward begins, ordered after writes to the shards at rest."""
        if FORWARD not in STAGE_STEPS[self.stage]:
            self.enter(FORWARD)  # refuses it
        self.stage = FORWARD  # without a call of `enter` in each step
        self.record.begin()
        self._resources.streams.unshard.follow_compute()
        self.is_at_rest = self.executor.has_freed = False

    def end_forward(self, *, empty: bool) -> None:
        """The outermost forward has ended; `empty`: no backward can follow. A backward inside of it may still have to
        be finished."""
        if self.stage is FORWARD:
            self.enter(IDLE if empty else AWAITING_BACKWARD)
            if not (empty or self.executor.has_freed) and self._units[-1].groups.shard.size > 1:
                for transport in self._resources.trimmable:  # the backward gathers nothing
                    transport.trim()
        for each in self.executor.ahead:
            _reshard_unused(each)
        self.executor.ahead.clear()

    def _forget_forward(self) -> None:
        """A forward failed: restore the state before it."""
        self._agreement.abandon(sys.exc_info()[1])
        if not self.record.continues:  # else a backward may reach an earlier pass, too
            self.record = ForwardRecord()
        self.is_at_rest = True
        self.executor.ahead.clear()
        self.requested.clear()

    def follow_writes(self) -> None:
        """Order the next gathers after writes to the shards at rest, for example by an optimizer."""
        self._resources.streams.unshard.follow_compute()
        self.is_at_rest = False

    # -- backwards ---------------------------------------------------------------------------------------------------

    def follow_requests(self) -> None:
        """Add units that a user unsharded, and no forward entered, to the backward: the user has computed with them."""
        for unit in self.requested:
            if unit.is_unsharded and not unit.backward.keep_unsharded and unit not in self.record.entered:
                self.record.add(unit)
                unit.backward.keep_unsharded = True
        self.requested.clear()

    def begin_backward(self, backward: Backward) -> None:
        """The `backward` begins, and ends with the graph task."""
        self.backward = backward
        self.enter(BACKWARD)
        backward.schedule.double = torch.is_grad_enabled()
        # Bound to this backward: on an accelerator a failed one may be released late, by another thread.
        ended, failed = self.end_backward, self.fail_backward
        hooks.at_end_of_backward(functools.partial(ended, backward), functools.partial(failed, backward))

    def run_without_graph(self, backward: Backward) -> None:
        """Run `backward` without a graph: it reduces gradients of earlier ones, and ends. Collective."""
        self.backward = backward
        self.enter(BACKWARD)
        try:
            self.end_backward(backward)
        except BaseException:
            self.fail_backward(backward)
            raise

    def end_backward(self, backward: Backward) -> None:
        """The graph task has ended: flush, and close the iteration. Collective."""
        if self.backward is not backward:
            return
        for observe in self._observers.graph_left:
            observe()
        try:
            self.executor.do(backward.ended(), backward)
            backward.finish()
            if backward.sync:
                self.left_unreduced = not backward.schedule.brings
            for observe in self._observers.backward_ends:
                observe()
            if not backward.schedule.double:
                self._check_unreached()
            self.backward = None
            self.close(Outcome.RETAINED if backward.schedule.double else Outcome.ENDED, backward)
        except BaseException as error:
            if self.backward is None:  # too late for `fail_backward`
                if self.stage is BACKWARD:
                    self.enter(FAILED)
                backward.finisher.backward_failed(self._units)
            if isinstance(error, RuntimeError):
                self._agreement.explain(error)
            raise

    def _check_unreached(self) -> None:
        """Raise for writes to unsharded parameters of units that the backward, which has ended, did not reach."""
        for unit in self._units:
            for views in unit.views:
                if views.left is not Left.COMPUTING:
                    unit.guard.check_left(unit)

    def fail_backward(self, backward: Backward) -> None:
        """The graph task failed: restore `.grad` immediately; the next call does everything else (`close`)."""
        if self.backward is not backward:
            return
        for observe in self._observers.graph_left:
            observe()
        self.backward = None
        self.enter(FAILED)
        self._stop_sharing()
        backward.finisher.backward_failed(self._units)
        self._agreement.publish_abandoned(None)
        self._agreement.resume_forward() if self.depth else self._agreement.rest()
        lost = [unit.label for unit in self._units if _rollback(unit)]
        if lost:
            self._agreement.warn(
                "a backward failed inside an accumulation window: the unsharded gradients of earlier microbatches are "
                f"dropped with it ({len(lost)} units, "
                f"first {lost[0]}). Run the window again from its first microbatch",
                names_rank=True,
            )

    def _stop_sharing(self) -> None:
        """A backward failed: units whose gradients were using the memory of their parameters stop doing so."""
        sharing = [unit for unit in self._units if any([grads.occupies_params for grads in unit.grads])]
        if not sharing:
            return
        # If ranks were lost, or have diverged, the model's own state does not explain the error.
        if not self._agreement.diverged and is_new("failed sharing", of=self):
            self._agreement.warn(
                f"a backward failed in unit {sharing[0].label}, while gradients were reusing the memory of its "
                "parameters. If autograd reported a variable that was modified by an inplace operation, a parameter is "
                "read after its gradient was computed (for example through detach()): run the step again; units of "
                "this class give gradients separate memory from now on",
                names_rank=True,
            )
        classes = {unit.entries.class_name for unit in sharing}
        for unit in self._units:
            if unit.entries.class_name in classes:
                unit.leaves.single_use = False

    def _drop_gradients(self) -> None:
        """Drop the reduced gradients of a failed backward."""
        for observe in self._observers.gradients_lost:
            observe(self._units)
        for unit in self._units:
            for grads in unit.grads:
                grads.drop()

    # -- ends --------------------------------------------------------------------------------------------------------

    def close(self, outcome: Outcome, backward: Backward | None = None) -> None:
        """End an iteration: its forward failed, the `backward` has ended, or an earlier one was not closed. Waits for
        issued collectives; is no collective. Units in whose forward the backward runs continue with this forward."""
        units = [unit for unit in self._units if unit.phase is not UNIT_FORWARD] if self.depth else self._units
        for unit in self._units if self.depth else ():
            if unit not in units:
                _rollback(unit)  # restores its `.grad`
        rest = self._agreement.resume_forward if self.depth else self._agreement.rest
        retained = outcome is Outcome.RETAINED
        if not (retained or outcome is Outcome.ENDED):
            failed = outcome is Outcome.FAILED
            self._drop_gradients() if failed else self._forget_forward()
            for unit in units if failed else self._units:
                unit.reset_to_idle()
                for views in unit.views:
                    views.show_anew()
            self._resources.limiter.free_all()
            if not failed:
                rest()
            if failed or self.stage not in LEFT_BEHIND:  # else a backward inside failed, which the next call closes
                self.enter(FORWARD if self.depth else AWAITING_BACKWARD if self.awaits_backward else IDLE)
            return
        if retained:
            for unit in units:
                _retain(unit)
        else:
            self.is_at_rest = not self.depth
            for unit in units:
                unit.reset_to_idle(keep_unsharded=backward is not None and backward.rules[unit].stays_unsharded)
        self._resources.streams.await_downloads()
        # After one that will be differentiated again holders refuse to be used, so no gradient of theirs is deferred.
        finisher = Finisher() if retained or backward is None else backward.finisher
        finished = finisher.backward_ended(units)
        self.pending = finisher.pending
        self._resources.limiter.free_all()
        self.enter(RETAINED if retained else FORWARD if self.depth else IDLE)
        rest()
        if not retained:
            self._resources.events.append(("end", "", UNIT_IDLE.value))
        for observe in self._observers.gradients_complete:
            observe(finished)
        if not (retained or backward is None):
            for observe in self._observers.backward_ended:
                observe(backward)

    def leave_backward(self) -> None:
        """End what the last backward did together with other ranks, before this rank does anything else with them: it
        failed, and autograd has not released it yet, or it was to be differentiated again."""
        if self.stage is RETAINED:
            self.close(Outcome.ENDED)
        elif self.backward is not None and not _torch.in_backward():
            self.fail_backward(self.backward)

    def finish_interrupted(self) -> None:
        """Bring units to rest after a failed backward, or one that was to be differentiated again, and wait for the
        collectives that it issued."""
        if self.stage in LEFT_BEHIND:
            self.leave_backward()
        if self.stage is FAILED:
            self.close(Outcome.FAILED)

    def wait_for_gradients(self) -> None:
        """Wait for the deferred reductions of the last backward, if any."""
        if self.pending is not None:
            awaited, self.pending = self.pending, None
            awaited.wait()

    def __del__(self) -> None:
        if self._resources.device.has_streams:  # memory would be freed while a stream writes to it, or reads it
            self.wait_for_gradients()
            if self._resources.tracker.live["unsharded"]:
                self._resources.streams.unshard.follow_compute()

    def retire_requests(self, *, written: bool = False) -> None:
        """Check units that a user unsharded between iterations, and free those whose shards were written to."""
        for unit in self.executor.ahead:
            unit.guard.end_request(unit, written=written)

    @property
    def shows_shards(self) -> bool:
        """Whether units are as between iterations, none is unsharded by a user, and no window is left unreduced."""
        return not (self.executor.ahead or self.is_interrupted or self.left_unreduced)

    def show_shards(self) -> None:
        """Prepare for a step of an optimizer: let parameters show their shards, and wait for gradients."""
        self.wait_for_gradients()
        if self.is_interrupted:
            self.reset_to_idle()
        elif not self.in_forward:
            self.retire_requests(written=True)

    def reset_to_idle(self) -> None:
        """Prepare for writes to shards: let parameters show them. A later backward gathers again."""
        self.wait_for_gradients()
        self.finish_interrupted()
        if self.is_at_rest:
            self.retire_requests(written=True)
        try:
            for unit in self._units:
                unit.guard.check_left(unit)
        finally:
            for unit in self._units:
                unit.reset_to_idle()
            self._resources.limiter.free_all()
            self.is_at_rest = True


def _reshard_unused(unit: Unit) -> None:
    """Free parameters that were gathered ahead, and that the forward did not use."""
    unused = [handle for handle in unit.handles if handle.state is GATHERING]
    for handle in unused:
        unit.resources.free(handle)
    if unused:
        unit.record_event("reshard")


def _retain(unit: Unit) -> None:
    """A backward that will be differentiated again has ended: parameters stay unsharded."""
    unit.phase = UNIT_IDLE
    unit.track_writes(ended=True)
    unit.backward = UnitBackward(keep_unsharded=unit.backward.keep_unsharded)


def _rollback(unit: Unit) -> bool:
    """Immediately after a failed backward, during exception handling: let users see the shard, restore `.grad`. True if
    a window was lost. Must not block or communicate.

    If the backward was inside of the unit's own forward, which may go on, leaves stay unsharded: autograd gives a leaf
    that showed another dtype meanwhile a second accumulator, and its gradient would arrive as two contributions.
    """
    goes_on = unit.phase is UNIT_FORWARD and unit.is_unsharded
    unit.backward.forget_graph()
    unit.pick_up_grads(sound=True)
    if unit.phase is not SUMMONED:  # else a user may write to the parameters, and the backward did not reach them
        for views in unit.views if not goes_on else ():
            views.show(SHOWS_SHARD)
        for grads in unit.grads:
            grads.unstash_grads()
    return any(grads.accumulation.window_open for grads in unit.grads)
