"""The order in which the models over one process group run, which must be the same on all ranks.

[Note: several models] A communicator matches collectives by their order. If ranks call two models of one structure in
different orders, gathers and reductions of one model meet those of the other, with equal sizes, and the sequence of
each model is as expected. So models over one process group have a sequence in common, of the beginnings of their
forwards and backwards, and of their collective calls. There, ranks meet only in the store, because models may
communicate over different axes; a turn that is predicted costs nothing but the prediction. A sequence begins when a
model first runs while another one lives on some rank, which is compared in the same exchange as the models. It replaces
the earlier one, so nothing is carried over to unrelated models.

In messages and codes a model is known by the order of first forwards. That this is the same on all ranks is checked by
the number of a model among all that were constructed over the group, if ranks have constructed equally many.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ...errors import AgreementError, by_ranks
from ..base.hashing import hash63
from ..base.peers import Issued
from ..base.per_group import for_group
from ..comm.axes import Axis
from .op_sequence import Meetings, OpSequence
from .ops import Op
from .rank_exchange import RankExchange

_REMEDY = (
    "All ranks must run their models in the same order: otherwise the collectives of different models are matched "
    "with each other, which mixes up the values of models with the same structure"
)


class Position(NamedTuple):
    """The position of a model among those over its process group.

    Attributes:
        number: among all that this rank has constructed, from 1 on; 0 for none.
        constructed: how many these are.
        living: the number of models that have run on this rank and live, including this one.
    """

    number: int = 0
    constructed: int = 0
    living: int = 0


class GroupMember:
    """One model of those over a process group; the first axis of its outermost unit with several ranks.

    Attributes:
        turns: the sequence that it shares with the others; None while there is no other.
        peers: its exchange, once it has run.
    """

    def __init__(self, sequence: OpSequence) -> None:
        self.turns: Turns | None = None
        self.peers: RankExchange | None = None
        self._sequence = sequence
        self._axis: Axis | None = None
        self._number = 0
        self._ops: dict[str, Op] = {}
        self._name = ""

    def count(self, axis: Axis, class_name: str) -> None:
        """Count this model among those that were constructed over the group of `axis`."""
        self._axis, self._name = axis, class_name
        known = _known(axis)
        known.constructed += 1
        self._number = known.constructed

    def come(self) -> Position:
        """This model's position, when it first runs."""
        if self._axis is None:
            return Position()
        known = _known(self._axis)
        known.members.add(self)
        return Position(self._number, known.constructed, len(known.members))

    def begin(self, peers: RankExchange, found: Mapping[int, Position]) -> None:
        """Begin the sequence of all models over the group, if there are several, after ranks have exchanged their
        positions.

        Raises:
            AgreementError: on every rank of the model: ranks run different models.
        """
        self.peers = peers
        numbers = {rank: each.number for rank, each in found.items() if each.number}
        if len({each.constructed for each in found.values()}) == 1 and len(set(numbers.values())) > 1:
            constructed = max(each.constructed for each in found.values())
            reported = by_ranks(
                {
                    rank: f"first runs the model whose outermost module was wrapped as number {number} of {constructed}"
                    for rank, number in sorted(numbers.items())
                }
            )
            peers.fail_with(AgreementError(f"{reported}. {_REMEDY}"))
        axis = self._axis
        if axis is None:
            return
        self._ops.clear()
        self._name = f"{self._name} (model {peers.scope.rpartition('.')[2]})"
        if max(found[rank].living for rank in axis.ranks if rank in found) > 1:
            Turns(axis, peers, list(_known(axis).members))

    def take(self, what: str) -> None:
        """Take the next turn, to do `what`. Not collective if it was expected.

        Raises:
            AgreementError: it is the turn of another model on some rank; on every rank, within seconds.
        """
        if self.turns is not None:
            op = self._ops.get(what)
            if op is None:
                # Whether ranks do different things with one model is a matter of its own sequence.
                op = self._ops[what] = Op(hash63(f"turn {self._name}"), f"{what} of {self._name}")
            self.turns.take(op)

    @property
    def sequence(self) -> OpSequence:
        """The model's own sequence."""
        return self._sequence


class Turns(OpSequence):
    """One rank's side of the sequence that the models over one process group have in common. [Note: several models]"""

    def __init__(self, axis: Axis, first: RankExchange, members: Sequence[GroupMember]) -> None:
        """`first`: the exchange of the model that has just run first."""
        peers = RankExchange()
        peers.rank, peers.ranks = first.rank, tuple(sorted(axis.ranks))
        # Other ranks of the model may have a group of their own, as the other replicas of HYBRID_SHARD.
        peers.scope, peers.watch = f"{first.scope}.turns of {peers.ranks[0]}", first.watch
        super().__init__(peers)
        self.meetings = _TurnMeetings(peers)
        self.collectives = Issued()  # of the models
        self._models = weakref.WeakSet(each.sequence for each in members)
        beside = weakref.WeakSet(each.peers for each in members if each.peers is not None)
        for each in members:
            each.turns = self
        for one in beside:
            one.beside = beside
        self.connect()

    def take(self, op: Op) -> None:
        """Do `op` next."""
        self._peers.raise_verdict()
        try:
            if self._predictor.expected() != op.code:
                self.meetings.announce(self.position, op)
                self.meetings.meet(self.position, self.progress.steps)
            self._follow(op)
        except AgreementError as error:
            self.fail(error, None)
            raise

    def fail(self, error: AgreementError, ranks: Sequence[int] | None) -> bool:
        concerned = super().fail(error, ranks)
        if concerned:
            for each in list(self._models):
                each.fail(error, None)
        return concerned

    @property
    def may_wait(self) -> bool:
        return any(each.busy for each in list(self._models))

    @property
    def doing(self) -> tuple[str, float]:
        return max((each.doing for each in list(self._models)), key=lambda found: found[1], default=super().doing)

    @property
    def last_step(self) -> str:
        models = sorted(self._models, key=lambda each: each.doing[1])
        return models[-1].last_step if models else ""


class _TurnMeetings(Meetings):
    def _words(self, texts: dict[tuple[int, ...], str], step: int) -> str:
        reported = by_ranks({rank: Op.of(text).words for ranks, text in sorted(texts.items()) for rank in ranks})
        return f"ranks run their models in different orders: {reported}. {_REMEDY}"


class _GroupModels:
    """The models over one process group."""

    def __init__(self) -> None:
        self.constructed = 0
        self.members: weakref.WeakSet[GroupMember] = weakref.WeakSet()


def _known(axis: Axis) -> _GroupModels:
    group: Any = axis.process_group
    return for_group(group, "models", _GroupModels)
