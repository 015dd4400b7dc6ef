"""The models over one process group, which must run in the same order on all ranks.

[Note: several models] A communicator matches collectives by their order. If ranks call two models of one structure in
different orders, gathers and reductions of one model meet those of the other, with equal sizes. So models over the same
axes have one log in common: the op of another model is not expected. A model that first runs joins the log if another
one of it lives on some rank, which is compared in the same exchange as the models; otherwise it begins a new log, so
nothing is carried over to unrelated models.

Models that share a process group and not all of their axes have a log each, since other ranks see only one of them, and
another one of the ranks of that group in common, of the beginnings of their forwards and backwards, and of their
collective calls. There, ranks meet only in the store.

In messages a model is known by the order of first forwards. That this is the same on all ranks is checked by the number
of a model among all that were constructed over the group, if ranks have constructed equally many.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

from ...errors import AgreementError, by_ranks
from ..base.hashing import hash63
from ..base.per_group import for_group
from ..comm.axes import Axis
from .divergence import IN_ORDER
from .op_sequence import OpLog, OpSequence
from .ops import Op


class Position(NamedTuple):
    """The position of a model among those over its process group.

    Attributes:
        number: among all that this rank has constructed, from 1 on; 0 for none.
        constructed: how many these are.
        others: which other models there are here, that have run and live.
    """

    number: int = 0
    constructed: int = 0
    others: int = 0


class Others(enum.IntFlag):
    """Models that have run on a rank, over one process group."""

    BESIDE = 1  # over the same axes
    ELSEWHERE = 2  # over other axes as well
    FAILED = 4  # ranks have diverged with the last one over the same axes


class GroupMember:
    """One model of those over a process group; the first axis of its outermost unit with several ranks."""

    def __init__(self, sequence: OpSequence) -> None:
        self.sequence = sequence
        self._axis: Axis | None = None
        self._number = 0
        self._turns: dict[str, Op] = {}
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
        log = known.logs.get(self._axes)
        others = Others.FAILED if log is not None and log.has_failed else Others(0)
        for each in [member.sequence.log for member in known.members]:
            if each is log:
                others |= Others.BESIDE
            elif not each.has_failed:
                others |= Others.ELSEWHERE
        return Position(self._number, known.constructed, others)

    def begin(self, found: Mapping[int, Position]) -> None:
        """Join the log of the models over the same axes, or begin another one, after ranks have exchanged their
        positions.

        Raises:
            AgreementError: on every rank of the model: ranks run different models.
        """
        peers, axis = self.sequence.peers, self._axis
        numbers = {rank: each.number for rank, each in found.items() if each.number}
        if len({each.constructed for each in found.values()}) == 1 and len(set(numbers.values())) > 1:
            constructed = max(each.constructed for each in found.values())
            reported = by_ranks(
                {
                    rank: f"first runs the model whose outermost module was wrapped as number {number} of {constructed}"
                    for rank, number in sorted(numbers.items())
                }
            )
            peers.fail_with(AgreementError(f"{reported}. {IN_ORDER}"))
        if axis is None:
            self.sequence.begin(OpLog.of(peers), self._name)
            return
        known, others = _known(axis), [each.others for each in found.values()]
        self._name = f"{self._name} (model {peers.scope.rpartition('.')[2]})"
        joins = any(each & Others.BESIDE for each in others) and not any(each & Others.FAILED for each in others)
        log = known.logs[self._axes] if joins else OpLog.of(peers)
        known.logs[self._axes] = log
        known.members.add(self)
        self.sequence.begin(log, self._name)
        if any(found[rank].others & Others.ELSEWHERE for rank in axis.ranks if rank in found):
            known.take_turns(axis, self.sequence)

    @property
    def _axes(self) -> Hashable:
        return tuple(each.group.ranks for each in self.sequence.peers.axes)

    def take(self, what: str) -> None:
        """Take the next turn, to do `what`, beside models with other axes. Not collective if it was expected.

        Raises:
            AgreementError: it is the turn of another model on some rank; on every rank, within seconds.
        """
        if self.sequence.turns is None:
            return
        op = self._turns.get(what)
        if op is None:
            # Whether ranks do different things with one model is a matter of its own log.
            op = self._turns[what] = Op(hash63(f"turn {self._name}"), what, model=self._name)
        self.sequence.take_turn(op)


class _GroupModels:
    """The models over one process group.

    Attributes:
        constructed: how many there were. members: those that have run, and live.
        logs: by the ranks of the axes of models.
    """

    def __init__(self) -> None:
        self.constructed = 0
        self.members: weakref.WeakSet[GroupMember] = weakref.WeakSet()
        self.logs: dict[Hashable, OpLog] = {}

    def take_turns(self, axis: Axis, newest: OpSequence) -> None:
        """Let all models take turns from now on, of which the `newest` one has just run first."""
        peers = newest.peers
        ranks = tuple(sorted(axis.ranks))
        # Other ranks of the model may have a group of their own, as the other replicas of HYBRID_SHARD.
        turns = OpLog(f"{peers.scope}.turns of {ranks[0]}", peers.rank, ranks, peers.store)
        for each in list(self.members):
            each.sequence.turns = turns
            turns.join(each.sequence, "")
        assert peers.watch is not None
        peers.watch.add(newest, turns)


def _known(axis: Axis) -> _GroupModels:
    group: Any = axis.process_group
    return for_group(group, "models", _GroupModels)
