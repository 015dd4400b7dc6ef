"""The order in which the models over one process group run, which must be the same on all ranks.

[Note: several models] A communicator matches collectives by their order. If ranks call two models of one structure in
different orders, gathers and reductions of one model meet those of the other, with equal sizes, and the sequence of
each model is as expected. So models over one process group have a sequence in common, of the beginnings of their
forwards and backwards, and of their collective calls; with one that begins inside of the forward of another, the place
where it does. One backward may go through several models: then their units take turns, in an order that the graph of
each rank determines. So when the last of these models ends its backward, ranks compare that order as well; if it does
not reduce, at the next one that does.

A model has a sequence for each of its groups: the replicas of HYBRID_SHARD may run two models in different orders, in
each of which its group of shards agrees. There, ranks meet only in the store, because models may communicate over
different axes; a turn that is predicted costs nothing but the prediction. A sequence begins when a model first runs
while another one lives on some rank, which is compared in the same exchange as the models. It replaces the earlier one,
so nothing is carried over to unrelated models. All ranks go through their groups in one order, that of the groups'
ranks, so that none wait for each other in different groups.

In messages and codes a model is known by its ranks and the order of first forwards over these. That this is the same on
all ranks is checked by the number of a model among all that were constructed over the group, if ranks have constructed
equally many.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ...errors import AgreementError, by_ranks, ranks_in_words
from ..base.hashing import hash63
from ..base.peers import Issued
from ..base.per_group import first_of, for_group
from ..comm.axes import Axis
from . import ops
from .op_sequence import Meetings, OpSequence
from .ops import IssuedBy, Op
from .rank_exchange import RankExchange

_REMEDY = (
    "All ranks must run their models in the same order: otherwise the collectives of different models are matched "
    "with each other, which mixes up the values of models with the same structure"
)


class Position(NamedTuple):
    """The position of a model among those over its process groups.

    Attributes:
        number: among all that this rank has constructed, from 1 on; 0 for none.
        constructed: how many these are.
        shared: a bit for each of its groups over which another model has run on this rank, and lives.
    """

    number: int = 0
    constructed: int = 0
    shared: int = 0


class GroupMember:
    """One model among those over its process groups.

    Attributes:
        sequence: the model's own.
        turns: the sequences that it shares with other models, in an order that is the same on all ranks.
        peers: its exchange, once it has run.
        name: the same on all ranks.
    """

    def __init__(self, sequence: OpSequence, issued: Issued) -> None:
        """`issued`: by backwards of the model."""
        self.sequence = sequence
        self.turns: Sequence[ModelOrder] = ()
        self.peers: RankExchange | None = None
        self.name = ""
        self._issued = issued
        self._turns: dict[int, ModelOrder] = {}  # by the number of the group among those of the model
        self._labels: Sequence[str] = ()
        self._axis: Axis | None = None
        self._number = 0
        self._ops: dict[tuple[object, ...], Op] = {}
        self._began_at = 0  # the position in its sequence when its forward, or its backward, began

    def count(self, axis: Axis | None, class_name: str) -> None:
        """Count this model among those that were constructed over the group of `axis`, the first one of its outermost
        unit with several ranks, if there is one."""
        self._axis, self.name = axis, class_name
        if axis is not None:
            known = _known(axis.process_group)
            known.constructed += 1
            self._number = known.constructed

    def come(self, groups: Sequence[Axis], labels: Sequence[str]) -> Position:
        """This model's position among those over its `groups`, when it first runs; `labels`: of its units."""
        self._labels = labels
        shared = 0
        for index, group in enumerate(groups):
            known = _known(group.process_group)
            known.members[self] = index
            shared |= (len(known.members) > 1) << index
        if self._axis is None:
            return Position(shared=shared)
        return Position(self._number, _known(self._axis.process_group).constructed, shared)

    def begin(self, peers: RankExchange, found: Mapping[int, Position]) -> None:
        """Begin the sequences of all models over its groups, where there are several, after ranks have exchanged their
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
        self._ops.clear()
        number, ranks = peers.scope.rpartition(".")[2], ranks_in_words(peers.ranks)
        self.name = f"{self.name} (model {number} over {ranks})"
        for index, axis in enumerate(peers.axes):
            group = axis.group
            if any(found[rank].shared >> index & 1 for rank in group.ranks if rank in found):
                ModelOrder(group, peers, index, _known(group.process_group).members)

    def take(self, what: str) -> None:
        """Take the next turn in each shared group, to do `what`. Not collective if it was expected.

        Raises:
            AgreementError: it is the turn of another model on some rank; on every rank, within seconds.
        """
        self._began_at = self.sequence.position
        for turns in self.turns:
            inside = turns.forwards_around(self)
            key = (what, *inside)
            op = self._ops.get(key)
            if op is None:
                # Whether ranks do different things with one model is a matter of its own sequence.
                where = "".join(f", after {steps} steps of the forward of {name} around it" for name, steps in inside)
                op = self._ops[key] = Op(hash63(f"turn {self.name}{where}"), f"{what} of {self.name}{where}")
            turns.take(op)

    def steps_of_forward(self) -> int:
        """How many steps its running forward has done; 0 if none runs."""
        return self.sequence.position - self._began_at if self.sequence.in_forward else 0

    def join(self, turns: ModelOrder, index: int) -> None:
        """Take part in the `turns` over the group of this `index` from now on."""
        self._turns[index] = turns
        self.turns = sorted(self._turns.values(), key=lambda each: each.order_key)
        for verb in ("gathered", "reduced"):
            if type(known := getattr(self._issued, verb)) is list:
                setattr(self._issued, verb, _InCommon(known, verb, self))

    def issues(self, verb: str, unit: int) -> None:
        """A collective of `unit`, by this `verb`, was issued: by a backward, or on request, which has a turn."""
        for turns in self.turns if self.sequence.in_backward else ():
            turns.in_common[verb].append(IssuedBy(self.name, unit, self._labels[unit]))

    def begin_backward(self) -> None:
        """A backward begins, or the part of one that goes through this model."""
        for turns in self.turns:
            turns.begin_backward(self)

    def compare_issued(self) -> None:
        """A backward ends that reduces: compare the order in which backwards through several models have issued their
        collectives, unless one of these goes on. Not collective if it was expected.

        Raises:
            AgreementError: another rank of a group has issued them in another order.
        """
        for turns in self.turns:
            turns.compare_issued(self)

    def forget_issued(self) -> None:
        """A backward was abandoned: what it has issued is not compared."""
        for turns in self.turns:
            turns.take_issued()
            turns.carried = 0


class _InCommon(list[int]):
    """The collectives of one verb that a model has issued, which are recorded in the order of all models, too."""

    def __init__(self, known: Sequence[int], verb: str, member: GroupMember) -> None:
        super().__init__(known)
        self._verb, self._member = verb, weakref.ref(member)

    def append(self, unit: int) -> None:
        super().append(unit)
        if (member := self._member()) is not None:
            member.issues(self._verb, unit)


def _are_of_several_models(gathered: Sequence[IssuedBy], reduced: Sequence[IssuedBy]) -> bool:
    return len({each.model for each in (*gathered, *reduced)}) > 1


class ModelOrder(OpSequence):
    """One rank's side of the sequence that the models over one process group have in common. [Note: several models]

    Attributes:
        order_key: by which all sequences are sorted.
        in_common: the collectives of the running backward of all models, by their verb: gathered or reduced.
        carried: a number for those of earlier ones through several models that ranks have yet to compare, since the
            last of these models did not reduce.
    """

    def __init__(self, group: Axis, first: RankExchange, index: int, members: Mapping[GroupMember, int]) -> None:
        """`first`: the exchange of the model that has just run first, of which the group has this `index`; `members`:
        all models, and which of their groups it is."""
        peers = RankExchange()
        peers.rank, peers.ranks = first.rank, tuple(sorted(group.ranks))
        # Other ranks of the model may have a group of their own, as the other replicas of HYBRID_SHARD.
        peers.scope, peers.watch = f"{first.scope}.turns {index} of {peers.ranks[0]}", first.watch
        super().__init__(peers)
        self.order_key = peers.ranks, peers.scope
        self.meetings = _TurnMeetings(peers)
        self.in_common: dict[str, list[IssuedBy]] = {"gathered": [], "reduced": []}
        self.carried = 0
        self._members = weakref.WeakSet(members)
        self._models = weakref.WeakSet(each.sequence for each in members)
        beside = [each.peers for each in members if each.peers is not None]
        for each, number in members.items():
            each.join(self, number)
        for one in beside:
            one.beside.update(beside)
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

    def forwards_around(self, member: GroupMember) -> list[tuple[str, int]]:
        """The names of other models whose forwards run, and how many steps each has done."""
        around = [(each.name, each.steps_of_forward()) for each in self._beside(member)]
        return sorted(each for each in around if each[1])

    def _beside(self, member: GroupMember) -> list[GroupMember]:
        """Other models, without those whose ranks have diverged: these do nothing any more, and may not have ended what
        they did."""
        others = (each for each in self._members if each is not member)
        return [each for each in others if each.peers is not None and each.peers.verdict is None]

    def take_issued(self) -> tuple[tuple[IssuedBy, ...], tuple[IssuedBy, ...]]:
        """The gathers and the reductions `in_common`; none are left."""
        gathered, reduced = (tuple(each) for each in self.in_common.values())
        for each in self.in_common.values():
            each.clear()
        return gathered, reduced

    def begin_backward(self, member: GroupMember) -> None:
        """The end of `GroupMember.begin_backward`, of a `member`."""
        if not any(each.sequence.in_backward for each in self._beside(member)):
            before = self.take_issued()
            if _are_of_several_models(*before):
                self.carried = ops.issued_by_all(*before, self.carried).code

    def compare_issued(self, member: GroupMember) -> None:
        """The end of `GroupMember.compare_issued`, of a `member`."""
        if not any(each.sequence.in_backward for each in self._beside(member)):
            found, before, self.carried = self.take_issued(), self.carried, 0
            # Without others, they may be left from a backward that failed, on the ranks where they still exist.
            if before or _are_of_several_models(*found):
                self.take(ops.issued_by_all(*found, before))

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
    """The models over one process group: how many were constructed, and those that have run and live, with its number
    among their groups."""

    def __init__(self) -> None:
        self.constructed = 0
        self.members: weakref.WeakKeyDictionary[GroupMember, int] = weakref.WeakKeyDictionary()


def _known(process_group: Any) -> _GroupModels:
    return for_group(first_of(process_group), "models", _GroupModels)
