"""One rank's side of the agreement of one model: turns the calls of its runtime into ops of the sequence.

Units are numbers here, in the order of the model, and all other information about the model is passed as values.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from ...errors import AgreementError, LostRankError
from ..base.events import EventLog
from ..base.hashing import hash63
from ..base.peers import BackwardPlan, Checksums, Fact, Peers, UnitEntry
from ..comm.comm_stats import CommStats
from ..comm.transport import Transport
from . import ops
from .divergence import ModelNames
from .model_check import InitialValues, exchange_facts, refuse_differences
from .once_per_job import warn_once_per_job
from .op_sequence import A_BACKWARD, A_FORWARD_AGAIN, THE_FORWARD, OpSequence
from .ops import ENDED, EVALUATION, PLANS, TRAINING, UNFORESEEN, Op, StepConditions, autocast_on
from .rank_exchange import RankExchange
from .turns import GroupMember, Position
from .unused_params import UnusedParams


class Agreement(Peers):
    """Compares the structure, the initial values and the order of operations of one model over its ranks.

    If ranks differ its methods raise an AgreementError, on every rank, within seconds. Methods that check or call are
    collective in the first iteration; later a rank waits for the others only when it does an unexpected operation.

    Attributes:
        peers: the other ranks; sequence: the order of operations agreed with them; unused: the agreement on parameters
            without gradients on any rank; rest, refuse, explain: methods of the sequence.
        initial_values: the comparison of initial values.
        member: the model among those over its process group.
    """

    def __init__(self, *, check_values: str) -> None:
        super().__init__()
        self.peers = RankExchange()
        self.sequence = sequence = OpSequence(self.peers)
        self.unused = UnusedParams(self.peers)
        self.rest, self.refuse, self.explain = sequence.rest, sequence.refuse, sequence.explain  # type: ignore[method-assign]
        self.initial_values = InitialValues(check_values)
        self.member = GroupMember(self.sequence, self.issued)
        self._sharded = False
        self._names = ModelNames()
        self._entered: list[Op] = []  # by unit
        self._forwards: list[str] = []  # the names of their forwards in messages, by unit
        self._backwards: dict[Hashable, Op] = {}  # by plan
        self._issued: Callable[..., Op] = ops.issued  # the op of a backward's collectives, by units
        self._mode = ""  # of the running forward
        self._opening: str | None = None  # the mode of the forward that the next unit begins
        self._autocast = ""  # of the last forward; if nothing is sharded, of the last training forward
        self._flags: tuple[bool, ...] = ()  # whether each parameter required a gradient in it

    # -- the model ---------------------------------------------------------------------------------------------------

    def connect(
        self,
        axes: Sequence[Transport],
        units: Sequence[UnitEntry],
        names: Callable[[], Iterable[str]],
        *,
        gathers: Sequence[Transport],
        sharded: bool,
        comm_stats: CommStats,
        events: EventLog,
    ) -> None:
        """Set the `units` of the model, the `names` of their parameters, and the `axes` that they are distributed over,
        none if this rank is alone. `sharded`: whether any unit is sharded."""
        self.peers.spread_over(axes)
        self.peers.gathers = gathers
        self._sharded = sharded
        self._names = self.sequence.meetings.names = ModelNames(units, names)
        self.unused.connect(units[-1].parameters.stop)
        self.sequence.follow(comm_stats, events)
        self._issued = functools.lru_cache(PLANS)(functools.partial(ops.issued, units))
        self._entered = [ops.entered(index, unit) for index, unit in enumerate(units)]
        self._forwards = [f"{THE_FORWARD} {unit.label}" for unit in units]

    def compare(self, facts: Callable[[], Sequence[Fact]], values: Callable[[], Checksums] | None) -> None:
        """Compare the models of all ranks by `facts`, and their initial `values` by checksums, if these are needed now.
        Collective over all axes.

        Raises:
            AgreementError: on every rank, names the first difference.
        """
        peers = self.peers
        if not peers.axes:
            return
        own = self.initial_values.take(values) if values is not None else []
        described = facts()
        position = self.member.come([axis.group for axis in peers.axes], [unit.label for unit in self._names.units])
        answers = exchange_facts(peers, described, extra=hash63(str(own)) if own else 0, position=position)
        if answers is None:
            return
        peers.know(list(answers))
        self.sequence.connect()
        refuse_differences(peers, described, answers)
        self.member.begin(peers, {rank: Position(*numbers) for rank, (_, _, *numbers) in answers.items()})
        if values is not None:
            self.initial_values.compare(peers, own, {rank: extra for rank, (_, extra, *_) in answers.items()})

    def compare_values(self, values: Callable[[], Checksums]) -> None:
        """Compare the initial values of all ranks, once. Collective over all axes at the first call only."""
        if not self.initial_values.due or not self.peers.axes:
            return
        own = self.initial_values.take(values)
        answers = self.peers.exchange(hash63("values"), hash63(str(own)))
        if answers is not None:
            self.sequence.require_same(answers, Op(0, "began to train"))
            self.initial_values.compare(self.peers, own, {rank: extra for rank, (_, extra) in answers.items()})

    @property
    def diverged(self) -> bool:
        return self.peers.verdict is not None

    def warn(self, message: str, *, names_rank: bool = False) -> None:
        warn_once_per_job(message, names_rank=names_rank)

    @property
    def compares_forwards(self) -> bool:
        """Whether all ranks must run the same forwards; with several ranks only if a unit is sharded."""
        return self._sharded or not self.peers.axes

    # -- forwards ----------------------------------------------------------------------------------------------------

    def begin_forward(self, trained: Callable[[], tuple[bool, ...]], *, training: bool, device_type: str) -> None:
        """Begin an outermost forward. If the last iteration was abandoned, wait until all ranks have abandoned it.

        `trained`: whether each parameter requires a gradient now. `device_type`: the device type of autocast.
        """
        if not self.peers.axes or self.forwards_are_local:
            return
        self.sequence.busy = True
        self._mode = self._opening = TRAINING if training else EVALUATION
        if training or self._sharded:
            self._autocast = autocast_on(device_type)
            self._flags = self.sequence.meetings.required = trained() if training else ()
        self.sequence.meet_abandoned()
        if self._sharded:
            self.sequence.start("the beginning of a forward")

    def check_order(self, unit: int, *, schedule: str, gathered: str = "") -> None:
        """Check that all ranks enter this unit next, and that all of them gather it or none does.

        `schedule`: the user-defined settings, in words. `gathered`: why the unit is gathered already (see
        `ops.entered`). If no unit is sharded, forwards do not communicate, and ranks may differ in them.
        """
        if not self._sharded or self.forwards_are_local:
            return
        op = self._entered[unit] if not gathered else ops.entered(unit, self._names.units[unit], gathered)
        if self._opening is not None:
            label = self._names.units[unit].label
            opening = ops.opening(self._opening, op.code, label, schedule, self._conditions(), self._flags)
            self._opening = None
            if self.member.turns:  # saves a call
                self.member.take("began a forward")
            self.sequence.start(self._forwards[unit])
            self.sequence.next(opening, unit=op.code, opens=True)
        else:
            self.sequence.activity = self._forwards[unit]
            self.sequence.next(op, unit=op.code)

    def check_request(self, unit: int, method: str) -> None:
        """Check that all ranks call this `method`, with which the user gathers or frees this unit."""
        if not self._sharded or self.forwards_are_local:
            return
        entry = self._names.units[unit]
        op = ops.requested(unit, entry, method)
        if self.sequence.activity is not None:
            self.sequence.next(op, unit=op.code)
        else:
            with self.waiting(f"{method}() of unit {entry.label}"):
                self.sequence.meet_abandoned()
                self.member.take(f"called {method}()")
                self.sequence.next(op)

    def end_forward(self) -> None:
        """End the outermost forward."""
        if self.sequence.activity is not None:
            self.sequence.next(ENDED[self._mode], completes=self._mode != TRAINING, ends=True)
        self.rest()

    def resume_forward(self) -> None:
        """Continue a forward after a backward inside of it."""
        self.rest()
        if self.peers.axes and self._sharded and not self.forwards_are_local:
            self.sequence.busy = True
            self.sequence.start(A_FORWARD_AGAIN)

    # -- backwards ---------------------------------------------------------------------------------------------------

    def check_backward(self, plan: Hashable, describe: Callable[[], BackwardPlan], *, reduces: bool) -> None:
        """Begin a backward, and check that it issues the same collectives on all ranks, and computes gradients of the
        same parameters.

        `plan`: equal for backwards that are equal on this rank; `describe` is called for a new one. `reduces`: whether
        it brings gradients, and any unit reduces them.
        """
        if not self.peers.axes:
            return
        begun_with = None if self._sharded else (self._conditions(), self._flags)
        op = self._backwards.get((plan, begun_with))
        if op is None:
            if len(self._backwards) == PLANS:  # of a model whose order changes at every step
                self._backwards.clear()
            op = self._backwards[plan, begun_with] = ops.backward(describe(), self._names.units, begun_with)
        self.sequence.busy = True
        self.sequence.meet_abandoned()
        if self.member.turns:
            self.member.begin_backward()
        self.sequence.start(A_BACKWARD)
        if self.member.turns:
            self.member.take("began a backward")
        try:
            self.unused.begin()
        except RuntimeError as error:
            self.explain(error)
            raise
        self.sequence.next(op, opens=not self._sharded, completes=not reduces)
        self.sequence.progress.backwards += 1

    def check_issued(self, lacking: int) -> int:
        """Check, after a backward that reduces, that all ranks have issued the same collectives. `lacking`: a bit for
        each parameter of which this rank has no gradient; returns those of which no rank has one. [Note: unused]"""
        if not self.peers.axes:
            return super().check_issued(lacking)
        op = self._issued(*self.issued.take())
        try:
            self.sequence.next(op, completes=True, ends=True, then=len(self.peers.axes))
        except AgreementError as error:
            if not isinstance(error, LostRankError):  # without it nobody goes on over this group
                self.unused.take_part()
            raise
        absent = self.unused.lacked_by_all(lacking)
        if self.member.turns:
            self.member.compare_issued()
        return absent

    def check_unforeseen(self) -> None:
        """Check, at the first gradient of a parameter in a backward of which ranks agreed that it brings none, that
        one came to all. Not collective."""
        if self.peers.watch is not None:
            self.peers.raise_verdict()
            self.sequence.show(UNFORESEEN)

    def check_gathered(self) -> None:
        """Check, after a backward that brought no gradients, that all ranks have gathered the same units. Not
        collective, since some ranks may wait for a gather."""
        if self.peers.watch is None:
            super().check_gathered()
        else:
            self.peers.raise_verdict()
            gathered, _, before = self.issued.take()
            self.sequence.show(self._issued(gathered, None, before), issued=self.sequence.issued)

    # -- between iterations ------------------------------------------------------------------------------------------

    @contextmanager
    def collective_call(self, call: str, units: Sequence[int] = (), *, always: bool = False) -> Iterator[None]:
        """Check that all ranks make this `call` of the API, between iterations, for the same `units`. Inside, this rank
        may wait for the others. If no unit is sharded, only an `always` call communicates.
        """
        if self.sequence.activity is not None or not (self._sharded or (always and self.peers.axes)):
            yield
            return
        with self.waiting(call):
            self.sequence.meet_abandoned()
            self.member.take(f"called {call}")
            self.sequence.next(ops.called(call, units, self._names.units))
            yield

    def numbers_of_ranks(self, what: str, mine: int) -> dict[int, int]:
        """Every rank's number for `what`, which all ranks need between iterations. Collective over all axes: 24 bytes
        per rank.
        """
        if not self.peers.axes:
            return {self.peers.rank: mine}
        with self.waiting(what):
            self.sequence.meet_abandoned()
            self.sequence.next(Op(hash63(what), f"requested {what}"))
            return {rank: code for rank, (code, _) in self.peers.numbers_of_ranks(mine).items()}

    def any_rank(self, flag: bool) -> bool:
        """Whether `flag` is set on any rank. Collective over all axes."""
        return any(code for code, _ in self.peers.numbers_of_ranks(int(flag)).values())

    def leave(self, loop: str, error: BaseException | None) -> None:
        """Check that all ranks leave a `loop` in which some may continue. With an `error` that is checked when the next
        forward begins.

        Raises:
            AgreementError: without an `error`: a rank continues; on every rank, within seconds.
        """
        if not self.peers.axes:
            return
        with self.waiting(loop):
            if error is None:
                self.sequence.meet_abandoned()
                self.sequence.next(Op(hash63(f"left {loop}"), f"left {loop}"))
            elif self.sequence.abandoned is None:
                self.publish_abandoned(error)

    @contextmanager
    def waiting(self, doing: str) -> Iterator[None]:
        """A context in which this rank may wait for others, in an iteration or between iterations."""
        if self.sequence.activity is not None or not self.peers.axes:
            yield
            return
        self.sequence.busy = True
        self.sequence.start(doing)
        try:
            yield
        except RuntimeError as error:
            self.explain(error)
            raise
        finally:
            self.rest()

    # -- ends --------------------------------------------------------------------------------------------------------

    def abandon(self, error: BaseException | None) -> None:
        """Notify the others that `error` ended a forward, or raise the disagreement that caused it."""
        if error is not None:
            self.explain(error)
        self.publish_abandoned(error)

    def publish_abandoned(self, error: BaseException | None) -> None:
        """Notify the others that an exception ended the iteration here, without waiting for them or raising."""
        self._opening = None
        super().publish_abandoned(error)
        self.member.forget_issued()
        self.sequence.publish_abandoned(error)

    def meet_abandoned(self) -> None:
        """If the last iteration was abandoned, wait until all ranks have abandoned it. Not collective."""
        self.sequence.meet_abandoned()

    def _conditions(self) -> StepConditions:
        """The conditions with which a step begins; resets them for the next one."""
        found = StepConditions(self.stepped, self.loaded, self._autocast)
        self.stepped = self.loaded = False
        return found


def agreement_of(peers: Peers) -> Agreement:
    """`peers` of a model that compares its ranks, as all do that this package's users build."""
    assert isinstance(peers, Agreement)
    return peers
