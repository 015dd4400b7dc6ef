"""Versions: what ranks keep brings any lost one back to the bit, and an interrupted refresh leaves the one before."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Sequence

import pytest
import torch

from flatfsdp.elastic import keeper as keepers
from flatfsdp.elastic.keeper import Keeper, Rebuilt, check_losses, kept_bytes
from flatfsdp.elastic.snapshot import Block
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

    def all(self, place: int, value: object) -> list[object]:
        self._brought[place] = value
        if self._barrier.wait(10) == 0:
            self.exchanges += 1
        self._barrier.wait(10)
        if self._breaks_at is not None and self.exchanges > self._breaks_at:
            raise Broken
        found = list(self._brought)
        self._barrier.wait(10)
        return found


class Member:
    """`keeper.Group` of one member."""

    def __init__(self, meeting: Meeting, place: int) -> None:
        self._meeting, self._place = meeting, place
        self.sent = 0

    def meet(self, numbers: tuple[int, ...]) -> list[tuple[int, ...]]:
        return self._meeting.all(self._place, numbers)  # type: ignore[return-value]

    def exchange(self, arrived: torch.Tensor, sent: torch.Tensor) -> None:
        self.sent += sent.nbytes
        rows = self._meeting.all(self._place, sent.clone())
        others = [place for place in range(len(rows)) if place != self._place]
        for row, place in zip(arrived, others, strict=True):
            row.copy_(rows[place][self._place - (self._place > place)])  # type: ignore[index]

    def finish(self) -> None:
        self._meeting.all(self._place, None)


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
    return [Keeper(ranks, rank, (Block(), Block())) for rank in ranks]


def refresh(group: Sequence[Keeper], number: int, states: Sequence[bytes], tails: Sequence[bytes], **how: int) -> None:
    """One refresh of all members."""
    meeting = Meeting(len(group), **how)

    def work(place: int) -> None:
        def take(block: Block) -> None:
            tensor = torch.frombuffer(bytearray(states[place]), dtype=torch.uint8) if states[place] else torch.empty(0)
            block.take(
                [tensor] if states[place] else [], [0] if states[place] else [], len(states[place]), tails[place]
            )

        group[place].complete(group[place].begin(number, take), Member(meeting, place))

    for error in on_members(len(group), work):
        if error is not None and not isinstance(error, Broken):
            raise error


def rebuild(group: Sequence[Keeper], number: int, lost: int) -> bytes:
    """The block of a lost member, from the others."""
    ranks = group[0].members
    gone = [ranks[lost]]
    survivors = [place for place in range(len(group)) if place != lost]
    sent = {place: group[place].parts_to_send(group[place].version(number), gone) for place in survivors}
    parts: list[Rebuilt] = []
    for place in survivors:
        version = group[place].version(number)
        needs = group[place].parts_to_receive(version, gone)
        arrived = {member: sent[member][place] for member in needs}
        assert {member: part.numel() for member, part in arrived.items()} == needs
        part = group[place].rebuild(version, gone, arrived)
        assert part is not None and part.member == lost
        parts.append(part)
    sizes = group[survivors[0]].version(number).sizes[lost]
    whole = torch.zeros(sizes.state + sizes.tail, dtype=torch.uint8)
    for part in parts:
        whole[part.start : part.start + part.data.numel()] = part.data
    return bytes(whole.tolist())


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
        tails = [rng.randbytes(rng.randrange(200)) for _ in ranks]
        refresh(group, number, states, tails)
        for lost in range(count):
            assert rebuild(group, number, lost) == states[lost] + tails[lost]
        if number:
            assert [each.numbers for each in group] == [[number - 1, number]] * count


@pytest.mark.parametrize("breaks_at", [0, 1, 2, 3])
def test_an_interrupted_refresh_leaves_the_version_before(breaks_at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keepers, "ROUND", 128)
    rng = random.Random(breaks_at)
    group = keepers_of((0, 1, 2))
    before = [rng.randbytes(400) for _ in range(3)]
    refresh(group, 7, before, [b"tail"] * 3)
    refresh(group, 8, [rng.randbytes(400) for _ in range(3)], [b"another"] * 3, breaks_at=breaks_at)
    common = set.intersection(*(set(each.numbers) for each in group))
    assert 7 in common
    for lost in range(3):
        assert rebuild(group, 7, lost) == before[lost] + b"tail"
    after = [rng.randbytes(100) for _ in range(3)]
    refresh(group, 9, after, [b""] * 3)  # reuses the memory of the interrupted one
    assert [rebuild(group, 9, lost) for lost in range(3)] == after


def test_a_group_without_a_loss_has_nothing_to_do() -> None:
    group = keepers_of((4, 6))
    refresh(group, 1, [b"a" * 100, b"b" * 30], [b"", b""])
    for each in group:
        version = each.version(1)
        assert not each.parts_to_send(version, [5]) and not each.parts_to_receive(version, [5])
        assert each.rebuild(version, [5], {}) is None


def test_two_losses_in_one_group_are_an_error() -> None:
    groups, alone, two_machines = [(0, 2), (1, 3)], range(4), (0, 0, 1, 1)
    check_losses(groups, alone, [0, 3])
    check_losses(groups, two_machines, [3, 1])  # which have left their blocks to 0 and 2
    check_losses(groups, two_machines, [2, 3])
    for nodes, lost in ((alone, [3, 1]), (two_machines, [0, 3, 1])):
        with pytest.raises(LostRankError, match=r"ranks 1, 3 are lost at once.*the group of ranks 1, 3 can lose one"):
            check_losses(groups, nodes, lost)


@pytest.mark.parametrize("members", [1, 2, 3, 4])
def test_memory_and_traffic_are_those_of_the_formulas(members: int) -> None:
    size, alignment = 960_000, 2 * 4096
    group, meeting = keepers_of(range(members)), Meeting(members)
    ranks = [Member(meeting, place) for place in range(members)]

    state = [torch.zeros(size, dtype=torch.uint8)]

    def work(place: int) -> None:
        keeper = group[place]
        for number in range(4):
            keeper.complete(keeper.begin(number, lambda block: block.take(state, [0], size, b"")), ranks[place])

    assert on_members(members, work) == [None] * members
    parity = size // (members - 1) if members > 1 else 0
    for keeper, rank in zip(group, ranks, strict=True):
        versions = [keeper.version(number) for number in (2, 3)]
        kept = [(version.block.memory.nbytes, version.parity.nbytes) for version in versions]
        assert all(size <= block < size + alignment and own == parity for block, own in kept)
        assert kept_bytes(size, ranks=members, machines=members, group=5) == 2 * (size + parity)
        assert rank.sent == (4 * size if members > 1 else 0)


def test_what_ranks_of_this_machine_have_not_whole_is_not_offered() -> None:
    theirs = (Block(), Block())
    left = {1: [Block.of_process(os.getpid(), block.descriptor) for block in theirs]}
    keeper, other = Keeper((0,), 0, (Block(), Block()), left), Keeper((1,), 1, theirs)
    group = Member(Meeting(1), 0)

    def take(block: Block) -> None:
        block.take([torch.arange(5)], [0], 40, b"tail")

    def breaks(block: Block) -> None:
        raise Broken

    seen = []
    for number in range(4):
        begun = other.begin(number, take)
        seen.append(keeper.numbers)
        keeper.complete(keeper.begin(number, take), group)
        seen.append(keeper.numbers)
        other.complete(begun, group)
    assert seen == [[], [0], [0], [0, 1], [1], [1, 2], [2], [2, 3]]
    with pytest.raises(Broken):
        other.begin(4, breaks)  # in the memory of 2
    assert keeper.numbers == [3]
    (left,) = keeper.blocks_of(keeper.version(3), [1])
    assert (left.state, left.tail, bytes(left.memory[40:44].tolist())) == (40, 4, b"tail")
