"""One rank's side of the agreement of one model: what its runtime reports, as ops of the sequence.

Units are numbers here, in the order of the model, and what the model does is handed over as values.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager

from ..base.events import EventLog
from ..base.hashing import hash63
from ..comm.comm_stats import CommStats
from ..comm.transport import Transport
from . import ops
from .divergence import ModelNames
from .model_check import Checksums, Fact, InitialValues, exchange_facts, refuse_differences
from .op_sequence import OpSequence
from .ops import CAME, ENDED, EVALUATION, NONE_CAME, PLANS, TRAINING, BackwardPlan, Op, StepConditions, autocast_on
from .rank_exchange import RankExchange


class Agreement:
    """What the ranks of one model must have in common: what it is, what it begins with, and the order of what it does.

    Where ranks differ its methods raise an AgreementError, on every rank, within seconds. Those that check or call are
    collective in the first iteration; after it a rank waits for the others only where it does what was not expected.

    Attributes:
        peers: the other ranks; sequence: the order agreed with them; unused: which parameters no rank brings gradients
            to; rest, refuse, explain: those of the sequence.
        initial_values: whether ranks begin from the same ones.
        stepped, loaded: an optimizer stepped, or a state dict was loaded, since a step began with it; noted where it
            happens.
        forwards_are_local: forwards communicate nothing: ranks may differ in them.
    """

    def __init__(self, *, check_values: str) -> None:
        self.peers = RankExchange()
        self.sequence = OpSequence(self.peers)
        self.unused = self.sequence.unused
        self.rest, self.refuse, self.explain = self.sequence.rest, self.sequence.refuse, self.sequence.explain
        self.initial_values = InitialValues(check_values)
        self.stepped = self.loaded = False
        self.forwards_are_local = False
        self._sharded = False
        self._names = ModelNames()
        self._entered: list[Op] = []  # by unit
        self._forwards: list[str] = []  # what runs then, in words
        self._backwards: dict[Hashable, Op] = {}  # by plan
        self._issued: Callable[..., Op] = ops.issued  # the op of what a backward issued, by units
        self._kind = ""  # of the running forward
        self._opening: str | None = None  # the kind of forward that the next unit begins
        self._autocast = ""  # of the last forward; where nothing is sharded, of the last training forward
        self._flags: tuple[bool, ...] = ()  # which parameters required gradients in it

    # -- the model ---------------------------------------------------------------------------------------------------

    def connect(
        self,
        axes: Sequence[Transport],
        names: ModelNames,
        *,
        sharded: bool,
        comm_stats: CommStats,
        events: EventLog,
    ) -> None:
        """The model has these units, spread over these `axes`; none where this rank is alone. `sharded`: whether a
        unit is."""
        self.peers.spread_over(axes)
        self._sharded = sharded
        self._names = self.sequence.meetings.names = names
        self.sequence.follow(comm_stats, events)
        self._issued = functools.lru_cache(PLANS)(functools.partial(ops.issued, names.units))
        self._entered = [ops.entered(index, unit) for index, unit in enumerate(names.units)]
        self._forwards = [f"the forward of unit {unit.label}" for unit in names.units]

    def compare(self, facts: Callable[[], Sequence[Fact]], values: Callable[[], Checksums] | None) -> None:
        """Compare the models of all ranks: `facts` has what must be the same. With checksums of the `values` that they
        begin with, where those matter now. Collective over all axes.

        Raises:
            AgreementError: on every rank, naming the first difference.
        """
        peers = self.peers
        if not peers.axes:
            return
        own = self.initial_values.take(values) if values is not None else []
        described = facts()
        answers = exchange_facts(peers, described, extra=hash63(str(own)) if own else 0)
        if answers is None:
            return
        peers.know(list(answers))
        self.sequence.connect()
        refuse_differences(peers, described, answers)
        if values is not None:
            self.initial_values.compare(peers, own, {rank: extra for rank, (_, extra) in answers.items()})

    def compare_values(self, values: Callable[[], Checksums]) -> None:
        """Compare the values that ranks began with, once. Collective over all axes at the first call, free after it."""
        if not self.initial_values.due or not self.peers.axes:
            return
        own = self.initial_values.take(values)
        answers = self.peers.exchange(hash63("values"), hash63(str(own)))
        if answers is not None:
            self.sequence.require_same(answers, Op(0, "began to train"))
            self.initial_values.compare(self.peers, own, {rank: extra for rank, (_, extra) in answers.items()})

    @property
    def compares_forwards(self) -> bool:
        """Whether all ranks run the same forwards; where nothing is sharded several need not."""
        return self._sharded or not self.peers.axes

    # -- forwards ----------------------------------------------------------------------------------------------------

    def begin_forward(self, trained: Callable[[], tuple[bool, ...]], *, training: bool, device_type: str) -> None:
        """An outermost forward begins. If the last iteration was abandoned, wait until all ranks have abandoned it.

        `trained`: which parameters require a gradient now. `device_type`: where autocast may be on.
        """
        if not self.peers.axes or self.forwards_are_local:
            return
        self.sequence.busy = True
        self._kind = self._opening = TRAINING if training else EVALUATION
        if training or self._sharded:
            self._autocast = autocast_on(device_type)
            self._flags = self.sequence.meetings.required = trained() if training else ()
        self.sequence.meet_abandoned()
        if self._sharded:
            self.sequence.start("the beginning of a forward")

    def check_order(self, unit: int, *, schedule: str) -> None:
        """This unit is about to be gathered: is it the one that all ranks gather?

        `schedule`: what users set, in words. Where no unit is sharded a forward communicates nothing, and ranks may
        differ in it.
        """
        if not self._sharded or self.forwards_are_local:
            return
        op = self._entered[unit]
        if self._opening is not None:
            label = self._names.units[unit].label
            opening = ops.opening(self._opening, op.code, label, schedule, self._conditions(), self._flags)
            self._opening = None
            self.sequence.start(self._forwards[unit])
            self.sequence.next(opening, unit=op.code, opens=True)
        else:
            self.sequence.part = self._forwards[unit]
            self.sequence.next(op, unit=op.code)

    def check_request(self, unit: int, method: str) -> None:
        """A user asks for this unit to be gathered or freed by this `method`."""
        if not self._sharded or self.forwards_are_local:
            return
        entry = self._names.units[unit]
        op = ops.requested(unit, entry, method)
        if self.sequence.part is not None:
            self.sequence.next(op, unit=op.code)
        else:
            with self.waiting(f"{method}() of unit {entry.label}"):
                self.sequence.meet_abandoned()
                self.sequence.next(op)

    def end_forward(self) -> None:
        """The outermost forward has ended."""
        if self.sequence.part is not None:
            self.sequence.next(ENDED[self._kind], completes=self._kind != TRAINING)
        self.rest()

    def resume_forward(self) -> None:
        """A backward inside of a forward has ended, which goes on."""
        self.rest()
        if self.peers.axes and self._sharded and not self.forwards_are_local:
            self.sequence.busy = True
            self.sequence.start("a forward, after a backward inside of it")

    # -- backwards ---------------------------------------------------------------------------------------------------

    def check_backward(self, plan: Hashable, describe: Callable[[], BackwardPlan], *, reduces: bool) -> None:
        """A backward begins: will all ranks issue the same collectives in it, and bring gradients to the same
        parameters?

        `plan`: equal where that is so on this rank; `describe` is called for one that is new. `reduces`: whether there
        is a unit that reduces gradients.
        """
        if not self.peers.axes:
            return
        begun_with = None if self._sharded else (self._conditions(), self._flags)
        op = self._backwards.get((plan, begun_with))
        if op is None:
            if len(self._backwards) == PLANS:  # of a model whose order is another at every step
                self._backwards.clear()
            op = self._backwards[plan, begun_with] = ops.backward(describe(), self._names.units, begun_with)
        self.sequence.busy = True
        self.sequence.meet_abandoned()
        self.sequence.start("a backward")
        self.sequence.next(op, opens=not self._sharded, completes=not reduces)
        if reduces:
            self.unused.begin(self.sequence.position, op.code)

    def check_issued(self, gathered: Sequence[int], reduced: Sequence[int]) -> None:
        """A backward that reduces has issued its collectives, those of these units: are they the same on all ranks?"""
        if self.peers.axes:
            self.sequence.next(self._issued(tuple(gathered), tuple(reduced)), completes=True)

    def foresees_none(self, brings: Callable[[], bool]) -> bool:
        """Whether a backward that begins is known to all ranks to bring no gradient: compared here where one before
        brought none. A rank whose gradients come late waits before them for gathers, which others would not issue if
        they waited for its note at their own first gradient. No collective.

        `brings`: whether this rank's will bring any.
        """
        if not self.sequence.expects(CAME, NONE_CAME) or self.peers.watch is None:
            return False
        self.peers.raise_verdict()
        op = CAME if brings() else NONE_CAME
        self.sequence.show(op)
        return op is NONE_CAME

    def check_gradients(self, *, came: bool) -> None:
        """The first gradient of a parameter came in a backward that communicates, or it ended and none `came`.

        Where none comes a rank gathers and reduces no more (`torch.autograd.grad` brings none), so all must be alike.
        That none comes is the rare case and part of the sequence; that some come is only where the other was expected.
        No collective.
        """
        if self.peers.watch is None:
            return
        self.peers.raise_verdict()
        if not came:
            self.sequence.show(NONE_CAME, issued=self.sequence.issued)
        elif self.sequence.expects(CAME, NONE_CAME):
            self.sequence.show(CAME)

    def check_gathered(self, gathered: Sequence[int]) -> None:
        """A backward ended in which no gradient of a parameter came, and these units were gathered: the same on all
        ranks? No collective, as some may wait for a gather.
        """
        if self.peers.watch is None:
            return
        self.peers.raise_verdict()
        self.sequence.show(self._issued(tuple(gathered), None), issued=self.sequence.issued)

    # -- between iterations ------------------------------------------------------------------------------------------

    @contextmanager
    def collective_call(self, call: str, units: Sequence[int] = (), *, always: bool = False) -> Iterator[None]:
        """A `call` of the user's, between iterations, which all ranks make for the same `units`: is it so? Inside, this
        rank may wait for them. Where no unit is sharded only an `always` call communicates.
        """
        if self.sequence.part is not None or not (self._sharded or (always and self.peers.axes)):
            yield
            return
        with self.waiting(call):
            self.sequence.meet_abandoned()
            self.sequence.next(ops.called(call, units, self._names.units))
            yield

    def numbers_of_ranks(self, what: str, mine: int) -> dict[int, int]:
        """Every rank's number, where all ranks need `what` between iterations. Collective over all axes: 24 bytes of
        each rank.
        """
        if not self.peers.axes:
            return {self.peers.rank: mine}
        with self.waiting(what):
            self.sequence.meet_abandoned()
            self.sequence.next(Op(hash63(what), f"asked for {what}"))
            return {rank: code for rank, (code, _) in self.peers.numbers_of_ranks(mine).items()}

    def any_rank(self, flag: bool) -> bool:
        """Whether `flag` is set on any rank. Collective over all axes."""
        return any(code for code, _ in self.peers.numbers_of_ranks(int(flag)).values())

    def leave(self, loop: str, error: BaseException | None) -> None:
        """This rank leaves a `loop` in which others may go on: do they leave, too? With an `error` that shows
        when the next forward begins.

        Raises:
            AgreementError: without an `error`; on every rank, within seconds.
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
        """Inside, this rank may wait for others, in an iteration or between them."""
        if self.sequence.part is not None or not self.peers.axes:
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
        """`error` ended a forward: let the others know, or raise the disagreement that it stems from."""
        if error is not None:
            self.explain(error)
        self.publish_abandoned(error)

    def publish_abandoned(self, error: BaseException | None) -> None:
        """An iteration ends here by an exception: let the others know, without waiting for them or raising."""
        self._opening = None
        self.sequence.publish_abandoned(error)

    def _conditions(self) -> StepConditions:
        """Those with which a step begins, and the next one has its own."""
        found = StepConditions(self.stepped, self.loaded, self._autocast)
        self.stepped = self.loaded = False
        return found
