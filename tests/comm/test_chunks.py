"""`ChunkStream` alone: several ranks' streams of random operations, moved on in random order."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from flatfsdp.engine.cpu import chunks
from flatfsdp.engine.cpu.chunks import ALIGNMENT, Chunk, ChunkStream
from tests.harness import thorough

pytestmark = pytest.mark.unit


@dataclass(frozen=True)
class Issue:
    """An operation, of which the streams know nothing."""

    number: int
    elements: int
    bytes_each: int
    depends: bool


class Rank:
    """A stream, and the bytes that passed through it.

    Attributes:
        to_issue: not yet issued. posted, taken: chunks, in order.
    """

    def __init__(self, capacity: int, to_issue: list[Issue]) -> None:
        self.stream: ChunkStream[Issue] = ChunkStream(capacity)
        self.to_issue = list(reversed(to_issue))
        self.posted: list[Chunk[Issue]] = []
        self.taken: list[Chunk[Issue]] = []

    def issue(self) -> bool:
        if not self.to_issue:
            return False
        each = self.to_issue.pop()
        self.stream.issue(each, each.elements, bytes_each=each.bytes_each, depends=each.depends)
        return True

    def post(self, peers: list[Rank], capacity: int) -> bool:
        drained = self.stream.is_drained([len(peer.taken) for peer in peers])
        assert drained == (all(self.posted == peer.taken for peer in (self, *peers)) and not self.stream.has_work)
        chunk = self.stream.to_post([len(peer.taken) for peer in peers])
        if chunk is None:
            return False
        begin, end = chunk.offset, chunk.offset + chunk.size
        assert begin % ALIGNMENT == 0
        assert 0 <= begin <= end <= capacity
        through = min(len(peer.taken) for peer in peers)
        unread = self.posted[through:]
        assert len(unread) < chunks.IN_FLIGHT, "more in flight than the window has"
        assert all(each.offset + each.size <= begin or end <= each.offset for each in unread), "overlaps what is unread"
        if chunk.operation.depends:
            before = [each for each in self.posted if each.operation is not chunk.operation]
            assert self.taken[: len(before)] == before, "posts what has not yet arrived"
        self.stream.was_posted()
        self.posted.append(chunk)
        return True

    def take(self, peers: list[Rank]) -> bool:
        chunk = self.stream.to_take([len(peer.posted) for peer in peers])
        if chunk is None:
            return False
        for each in (self, *peers):
            assert each.posted[chunk.number] == chunk, "ranks differ in what a chunk is"
        self.stream.was_taken()
        self.taken.append(chunk)
        return True


def some_issues(draw: random.Random, capacity: int) -> list[Issue]:
    found = []
    for number in range(draw.randint(1, 12)):
        bytes_each = draw.choice([1, 2, 4, 12, 16 * 7])
        most = capacity * draw.choice([1, 1, 3]) // bytes_each
        elements = draw.choice([1, 2, draw.randint(1, 50), draw.randint(1, most)])
        found.append(Issue(number, elements, bytes_each, number > 0 and draw.random() < 0.3))
    return found


@pytest.mark.parametrize("seed", thorough.seeds(60, 3000))
def test_chunks_in_any_order_of_events_never_overlap_and_all_come_to_an_end(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(seed)
    if seed % 2:
        window = draw.choice([1, 2, 5])
        monkeypatch.setattr(chunks, "IN_FLIGHT", window)
    world, capacity = draw.randint(2, 5), ALIGNMENT * draw.choice([6, 8, 13, 64, 200])
    issues = some_issues(draw, capacity)
    ranks = [Rank(capacity, issues) for _ in range(world)]
    weights = [draw.choice([1, 1, 10]) for _ in range(world)]
    moves = [(rank, what) for rank in range(world) for what in ("issue", "post", "take")]

    def move(rank: int, what: str) -> bool:
        this, peers = ranks[rank], ranks[:rank] + ranks[rank + 1 :]
        if what == "issue":
            return this.issue()
        return this.post(peers, capacity) if what == "post" else this.take(peers)

    while any(move(rank, what) for rank, what in draw.sample(moves, len(moves))):
        for _ in range(20):
            (rank,) = draw.choices(range(world), weights)
            move(rank, draw.choice(["issue", "post", "take"]))
    for each in ranks:
        assert not each.to_issue
        assert not each.stream.has_work, "ranks that issued the same wait for each other"
        assert not each.stream.has_work
        assert each.taken == ranks[0].taken == each.posted
        passed = {issue.number: [chunk for chunk in each.taken if chunk.operation is issue] for issue in issues}
        for issue in issues:
            parts = passed[issue.number]
            assert [part.start for part in parts] == [0, *(part.end for part in parts[:-1])]
            assert parts[-1].end == issue.elements
            assert [part.is_last for part in parts] == [False] * (len(parts) - 1) + [True]
            assert all(part.size >= (part.end - part.start) * issue.bytes_each for part in parts)
    assert [chunk.number for chunk in ranks[0].taken] == list(range(len(ranks[0].taken)))


def test_two_chunks_find_room_whatever_their_size() -> None:
    """So a rank writes one while its peers read the other."""
    for capacity in (512, 1000, 4096, 4 * 1024 * 1024):
        for bytes_each in (1, 3, 4, 28, 112):
            stream: ChunkStream[str] = ChunkStream(capacity)
            stream.issue("large", 10 * capacity, bytes_each=bytes_each)
            for _ in range(2):
                assert stream.to_post([0]) is not None
                stream.was_posted()


def test_what_was_posted_waits_in_the_window_until_the_last_peer_has_taken_it() -> None:
    stream: ChunkStream[int] = ChunkStream(1024 * ALIGNMENT)
    for number in range(chunks.IN_FLIGHT + 2):
        stream.issue(number, 1, bytes_each=1)
    for _ in range(chunks.IN_FLIGHT):
        assert stream.to_post([0, 0]) is not None
        stream.was_posted()
    assert stream.to_post([0, 0]) is None
    assert stream.to_post([5, 0]) is None
    following = stream.to_post([5, 1])
    assert following is not None
    assert following.number == chunks.IN_FLIGHT


def test_a_rank_takes_what_all_have_posted_itself_included() -> None:
    stream: ChunkStream[str] = ChunkStream(1024)
    stream.issue("sum", 1, bytes_each=4)
    assert stream.to_take([1, 1]) is None
    stream.was_posted()
    assert stream.to_take([1, 0]) is None
    assert stream.to_take([1, 1]) is not None
    assert stream.has_work
    stream.was_taken()
    assert not stream.has_work
