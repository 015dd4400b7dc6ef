"""Versions: what ranks keep brings any lost one back to the bit, and an interrupted refresh leaves the one before."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from flatfsdp.elastic import keeper as keepers
from flatfsdp.elastic.exchange import EpochRanks
from flatfsdp.elastic.holding import Entry, Facts, Holding
from flatfsdp.elastic.keeper import Keeper, kept_bytes
from flatfsdp.elastic.machines import Machines
from flatfsdp.elastic.snapshot import Block
from flatfsdp.engine.base.plain_data import encode
from flatfsdp.errors import LostRankError

pytestmark = pytest.mark.unit


class Broken(Exception):
    """A rank is lost."""


class Meeting:
    """The exchanges of one group, whose members are threads. From the exchange number `breaks_at` on they fail."""

    def __init__(self, members: int, breaks_at: int | None = None) -> None:
        self._barrier = threading.Barrier(members)
        self._brought: list[object] = [None] * members
        self._breaks_at, self.exchanges = breaks_at, 0

    def all(self, place: int, value: object) -> list[Any]:
        self._brought[place] = value
        if self._barrier.wait(10) == 0:
            self.exchanges += 1
        self._barrier.wait(10)
        if self._breaks_at is not None and self.exchanges > self._breaks_at:
            raise Broken
        found = list(self._brought)
        self._barrier.wait(10)
        return found


class Member(EpochRanks):
    """The exchanges of one member of `ranks`."""

    def __init__(self, meeting: Meeting, place: int, ranks: Sequence[int]) -> None:
        self._meeting, self._place, self._ranks = meeting, place, [*ranks]
        self.sent = self.received = 0

    def swap(self, sent: Mapping[int, torch.Tensor], arriving: Mapping[int, torch.Tensor]) -> None:
        found = self._meeting.all(self._place, {rank: each.clone() for rank, each in sent.items()})
        brought = {
            rank: each[self._ranks[self._place]]
            for rank, each in zip(self._ranks, found, strict=True)
            if rank in arriving
        }
        assert brought.keys() == arriving.keys()
        for rank, each in brought.items():
            assert each.shape == arriving[rank].shape
            arriving[rank].copy_(each)
        self.sent += sum(each.nbytes for each in sent.values())
        self.received += sum(each.nbytes for each in arriving.values())

    def finish(self) -> bool:
        return bool(self._meeting.all(self._place, None) == [])


def on_members(count: int, work: Callable[[int], None]) -> list[BaseException | None]:
    """`work` of each member in a thread of its own; their exceptions."""
    errors: list[BaseException | None] = [None] * count

    def run(place: int) -> None:
        try:
            work(place)
        except BaseException as error:
            errors[place] = error

    threads = [threading.Thread(target=run, args=(place,)) for place in range(count)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(30)
    return errors


def keepers_of(ranks: Sequence[int]) -> list[Keeper]:
    """Those of the members of a group, each on a machine of its own."""
    machines = Machines(tuple(range(20)), {})
    return [Keeper(rank, (Block(), Block()), machines, groups=[tuple(ranks)]) for rank in ranks]


def facts(size: int, more: int = 0) -> Facts:
    """Those of a block of so many bytes, with so many bytes `more` of their own."""
    entry = Entry("bytes", "", torch.uint8, (size,), None, 0, size)
    return Facts((entry,) * (size > 0), {}, ({"more": "x" * more},))


def holding(data: bytes, more: int = 0) -> tuple[Holding, bytes]:
    """A block of this `data`, and its facts, encoded."""
    known = facts(len(data), more)
    tensors = [torch.frombuffer(bytearray(data), dtype=torch.uint8)] if data else []
    return Holding(known, tensors), encode((encode(known.entries), known.values, known.groups))


def refresh(group: Sequence[Keeper], number: int, states: Sequence[bytes], more: int = 0, **how: int) -> None:
    """One refresh of all members."""
    meeting = Meeting(len(group), **how)

    def work(place: int) -> None:
        begun = group[place].begin(number, *holding(states[place], more * place))
        group[place].complete(begun, Member(meeting, place, group[place].members))

    for error in on_members(len(group), work):
        if error is not None and not isinstance(error, Broken):
            raise error


def rebuild(group: Sequence[Keeper], number: int, lost: int) -> bytes:
    """What a lost member had, from the others."""
    gone = group[0].members[lost]
    survivors = [place for place in range(len(group)) if place != lost]
    rank_of = {group[0].members[place]: now for now, place in enumerate(survivors)}
    meeting, parts = Meeting(len(survivors)), [list[Holding]() for _ in survivors]

    def work(now: int) -> None:
        member = Member(meeting, now, range(len(survivors)))
        parts[now] = group[survivors[now]].brought(number, [gone], rank_of, member)[1:]

    assert on_members(len(survivors), work) == [None] * len(survivors)
    found: dict[int, bytes] = {}
    for (part,) in parts:
        for entry, tensor in zip(part.facts.entries, part.tensors, strict=True):
            found[entry.start] = bytes(tensor.tolist())
    return b"".join(found[start] for start in sorted(found))


@pytest.mark.parametrize("seed", range(12))
def test_any_member_comes_back_after_several_refreshes_of_other_sizes(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    monkeypatch.setattr(keepers, "ROUND", rng.choice((64, 128, 1 << 20)))
    count = rng.randrange(2, 5)
    ranks = sorted(rng.sample(range(20), count))
    group = keepers_of(ranks)
    for number in range(4):
        states = [rng.randbytes(rng.choice((0, 5, 64, rng.randrange(3000)))) for _ in ranks]
        refresh(group, number, states, more=rng.randrange(100))
        for lost in range(count):
            assert rebuild(group, number, lost) == states[lost]
        if number:
            assert [each.numbers for each in group] == [[number - 1, number]] * count


@pytest.mark.parametrize("breaks_at", range(6))
def test_an_interrupted_refresh_leaves_the_version_before(breaks_at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keepers, "ROUND", 128)
    rng = random.Random(breaks_at)
    group = keepers_of((0, 1, 2))
    before = [rng.randbytes(400) for _ in range(3)]
    refresh(group, 7, before)
    refresh(group, 8, [rng.randbytes(400) for _ in range(3)], breaks_at=breaks_at)
    common = set.intersection(*(set(each.numbers) for each in group))
    assert 7 in common
    for lost in range(3):
        assert rebuild(group, 7, lost) == before[lost]
    after = [rng.randbytes(100) for _ in range(3)]
    refresh(group, 9, after)  # reuses the memory of the interrupted one
    assert [rebuild(group, 9, lost) for lost in range(3)] == after


def test_a_group_without_a_loss_rebuilds_nothing() -> None:
    group = keepers_of((4, 6))
    refresh(group, 1, [b"a" * 100, b"b" * 30])
    meeting = Meeting(2)

    def work(place: int) -> None:
        (own,) = group[place].brought(1, [5], {4: 0, 6: 1}, Member(meeting, place, range(2)))
        assert bytes(own.tensors[0].tolist()) in (b"a" * 100, b"b" * 30)

    assert on_members(2, work) == [None] * 2


@pytest.mark.parametrize(
    ("nodes", "lost", "words"),
    [
        ((0, 1, 2, 3), [0, 3], ""),
        ((0, 0, 1, 1), [3, 1], ""),  # which have left their blocks to 0 and 2
        ((0, 0, 1, 1), [2, 3], ""),
        ((0, 1, 2, 3), [3, 1], "ranks 1, 3 are lost at once, and nobody else has their state"),
        ((0, 0, 1, 1), [0, 3, 1], "ranks 1, 3 are lost at once"),
    ],
)
def test_two_losses_in_one_group_are_an_error(nodes: tuple[int, ...], lost: list[int], words: str) -> None:
    kept = Keeper(0, (Block(), Block()), Machines(nodes, {}), groups=[(0, 2), (1, 3)])
    with pytest.raises(LostRankError, match=words) if words else nullcontext():
        kept.check(lost)


def test_the_loss_of_all_that_hold_alike_is_an_error() -> None:
    alone, together = (
        Keeper(0, (Block(), Block()), Machines(nodes, {}), alike=((0, 2), (1, 3)))
        for nodes in ((0, 1, 2, 3), (0, 0, 1, 1))
    )
    alone.check([0, 1])
    together.check([2, 3])
    together.check([0, 2])  # which have left their blocks to 1 and 3
    with pytest.raises(LostRankError, match="ranks 0, 2 are lost at once, and nobody else has their state"):
        alone.check([0, 2])


@pytest.mark.parametrize("members", [1, 2, 3, 4])
def test_memory_and_traffic_are_those_of_the_formulas(members: int) -> None:
    size, alignment = 960_000, 2 * 4096
    group, meeting = keepers_of(range(members)) if members > 1 else [alone(0)], Meeting(members)
    ranks = [Member(meeting, place, range(members)) for place in range(members)]

    def work(place: int) -> None:
        keeper = group[place]
        for number in range(4):
            keeper.complete(keeper.begin(number, *holding(bytes(size))), ranks[place])

    assert on_members(members, work) == [None] * members
    parity = size // (members - 1) if members > 1 else 0  # without the facts
    for keeper, rank in zip(group, ranks, strict=True):
        versions = [keeper.version(number) for number in (2, 3)]
        kept = [(version.block.memory.nbytes, version.parity.nbytes) for version in versions]
        assert all(size <= block < size + alignment and parity <= own < parity + alignment for block, own in kept)
        assert kept_bytes(size, ranks=members, machines=members, group=5) == 2 * (size + parity)
        for moved in (rank.sent, rank.received):
            assert 4 * size <= moved < 4 * (size + alignment) if members > 1 else moved == 0


def alone(rank: int, left: Mapping[int, Sequence[Block]] | None = None, blocks: Sequence[Block] = ()) -> Keeper:
    """That of a rank on one machine with others, which have `left` their blocks."""
    return Keeper(rank, blocks or (Block(), Block()), Machines((0, 0), left or {}))


def test_what_ranks_of_this_machine_have_not_whole_is_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = (Block(), Block())
    keeper = alone(0, {1: [Block.of_process(os.getpid(), block.descriptor) for block in theirs]})
    other, group = alone(1, blocks=theirs), Member(Meeting(1), 0, [0])

    def breaks(*unused: Any) -> None:
        raise Broken

    seen = []
    for number in range(4):
        begun = other.begin(number, *holding(b"theirs %d" % number))
        seen.append(keeper.numbers)
        keeper.complete(keeper.begin(number, *holding(b"own")), group)
        seen.append(keeper.numbers)
        other.complete(begun, group)
    assert seen == [[], [0], [0], [0, 1], [1], [1, 2], [2], [2, 3]]
    with monkeypatch.context() as patch, pytest.raises(Broken):
        patch.setattr(Block, "take", breaks)
        other.begin(4, *holding(b"theirs 4"))  # in the memory of 2
    assert keeper.numbers == [3]
    own, left = keeper.brought(3, [1], {0: 0}, group)
    assert [bytes(each.tensors[0].tolist()) for each in (own, left)] == [b"own", b"theirs 3"]
