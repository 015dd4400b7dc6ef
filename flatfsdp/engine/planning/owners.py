"""The ranks that step on whole matrices of which several ranks have parts, and what ranks send each other for it.

[Note: owners] Each matrix has one *owner*, the same at every step, since its optimizer state stays there. A matrix that
no shard boundary cuts is stepped on where it lies. The others are given out by their cost, the longest first, each to
the rank that has least to compute so far, and among equal ones to that which has most of the matrix already. Replicas
of ranks have owners of their own. Matrices are exchanged in *buckets*, so that one bucket is sent while another is
computed. Every bucket has about equally many elements for each owner, so that all ranks compute. Everything here is a
function of layouts and costs, which are equal on all ranks, in integers only: no rank needs to know from another what
that sends.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from ...errors import ConfigValueError
from ..layout.layout import FlatLayout, Span

NOTHING = Span(0, 0)
Piece = tuple[int, Span]  # the index of a matrix, and elements of it


@dataclass(frozen=True)
class Matrix:
    """A tensor that an optimizer has to see completely.

    Attributes:
        name: for messages.
        shape: its shape.
        parts: by rank, in this order, the elements that it has; without empty ones. Together they are the matrix.
        cost: of a step on it, in any unit.
        asked: the rank that a user has chosen as its owner; or the one that has its state already.
    """

    name: str
    shape: tuple[int, ...]
    parts: Mapping[int, Span]
    cost: int
    asked: int | None = None

    @property
    def numel(self) -> int:
        """The number of its elements."""
        return prod(self.shape)

    @property
    def is_cut(self) -> bool:
        """Whether several ranks have parts of it."""
        return len(self.parts) > 1

    def span_of(self, rank: int) -> Span:
        """The elements that `rank` has; `[0, 0)` if it has none."""
        return self.parts.get(rank, NOTHING)


def parts_of(layout: FlatLayout, index: int, within: Span) -> dict[int, Span]:
    """By rank, in this order, the elements that it has of those `within` the parameter `index`, counted from the first
    of these; without empty ones."""
    start = layout.spans[index].start
    segment = next(each for each in layout.segments if each.members.start <= index < each.members.stop)
    piece = segment.span.numel // layout.world
    if not piece or within.is_empty:
        return {}
    first = (start + within.start - segment.span.start) // piece
    last = (start + within.stop - 1 - segment.span.start) // piece
    found = {rank: within.intersect(layout.span_in_param(index, rank)) for rank in range(first, last + 1)}
    return {rank: own.shift(-within.start) for rank, own in found.items() if not own.is_empty}


@dataclass(frozen=True)
class OwnerPlan:
    """The owner of each matrix, and the order in which matrices are exchanged.

    Attributes:
        world: the number of ranks that have different parts.
        matrices: those that the optimizer steps on.
        owners: for each the rank that owns it.
        buckets: the matrices of each bucket, as indices, in the order of `matrices`.

    Example:
        >>> halves = {0: Span(0, 4), 1: Span(4, 8)}
        >>> matrices = [Matrix("a", (2, 4), halves, cost=8), Matrix("b", (4, 2), halves, cost=8)]
        >>> plan = OwnerPlan.of(matrices, world=2, bucket=8)
        >>> plan.owners, plan.buckets, plan.sent(0), plan.returned(0), plan.imbalance
        ((0, 1), ((0, 1),), 4, 4, 1.0)
    """

    world: int
    matrices: tuple[Matrix, ...]
    owners: tuple[int, ...]
    buckets: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, matrices: Sequence[Matrix], *, world: int, bucket: int) -> OwnerPlan:
        """The plan for `matrices`; `bucket`: the elements of a bucket, about.

        Raises:
            ConfigValueError: an owner that was asked for is no rank.
        """
        matrices = tuple(matrices)
        owners = _balanced(matrices, world)
        return cls(world, matrices, owners, _in_buckets(matrices, owners, max(1, bucket // world)))

    # -- what ranks send -----------------------------------------------------------------------------------------------

    def outgoing(self, bucket: Iterable[int], rank: int) -> list[list[Piece]]:
        """For each owner the parts of matrices in `bucket` that `rank` sends to it, in this order; they come back in
        the same one."""
        found: list[list[Piece]] = [[] for _ in range(self.world)]
        for index in bucket:
            span, owner = self.matrices[index].span_of(rank), self.owners[index]
            if owner != rank and not span.is_empty:
                found[owner].append((index, span))
        return found

    def incoming(self, bucket: Iterable[int], owner: int) -> list[list[Piece]]:
        """For each rank the parts of matrices in `bucket` that it sends to `owner`: its `outgoing` ones to it."""
        found: list[list[Piece]] = [[] for _ in range(self.world)]
        for index in bucket:
            for rank, span in self.matrices[index].parts.items() if self.owners[index] == owner else ():
                if rank != owner:
                    found[rank].append((index, span))
        return found

    def is_exchanged(self, bucket: Iterable[int]) -> bool:
        """Whether any rank sends anything for the matrices of `bucket`."""
        return any(rank != self.owners[index] for index in bucket for rank in self.matrices[index].parts)

    def sent(self, rank: int) -> int:
        """The elements that `rank` sends to owners in a step: its parts of matrices that others own. As many updated
        ones come back."""
        return elements_of(self.outgoing(range(len(self.matrices)), rank))

    def returned(self, rank: int) -> int:
        """The elements that `rank` sends back in a step: all of its matrices but its own parts. As many come to it
        before."""
        return elements_of(self.incoming(range(len(self.matrices)), rank))

    @property
    def exchanges(self) -> int:
        """The collectives of a step: for each bucket one to the owners and one back, if anything is cut."""
        return 2 * sum(map(self.is_exchanged, self.buckets))

    # -- balance -------------------------------------------------------------------------------------------------------

    @cached_property
    def loads(self) -> tuple[int, ...]:
        """For each rank the cost of its matrices."""
        loads = [0] * self.world
        for matrix, owner in zip(self.matrices, self.owners, strict=True):
            loads[owner] += matrix.cost
        return tuple(loads)

    @property
    def imbalance(self) -> float:
        """The cost of the rank that computes longest, as a multiple of the mean: 1 if all compute equally long."""
        total = sum(self.loads)
        return max(self.loads) * len(self.loads) / total if total else 1.0

    def facts(self) -> Iterator[str]:
        """Everything that has to be equal on all ranks, in words."""
        yield f"world {self.world} buckets {self.buckets}"
        for matrix, owner in zip(self.matrices, self.owners, strict=True):
            parts = " ".join(f"{rank}:{span}" for rank, span in matrix.parts.items())
            yield f"{matrix.name!r} {matrix.shape} {owner} {parts}"


def elements_of(of_ranks: Iterable[Iterable[Piece]]) -> int:
    """The elements of the pieces of all ranks."""
    return sum(span.numel for pieces in of_ranks for _, span in pieces)


def _balanced(matrices: Sequence[Matrix], world: int) -> tuple[int, ...]:
    owners = [-1] * len(matrices)
    loads = [0] * world
    free = []
    for index, matrix in enumerate(matrices):
        if matrix.asked is not None and not 0 <= matrix.asked < len(loads):
            raise ConfigValueError(
                f"owners: expected a rank from 0 to {len(loads) - 1} for {matrix.name!r}, found {matrix.asked}"
            )
        if matrix.asked is None:
            free.append(index)
        else:
            owners[index] = matrix.asked
            loads[matrix.asked] += matrix.cost
    idle = [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(idle)
    # Where a matrix lies, it is stepped on without traffic: a given load, before others are balanced.
    for index in sorted(free, key=lambda index: (matrices[index].is_cut, -matrices[index].cost, index)):
        while loads[idle[0][1]] != idle[0][0]:  # it was given a matrix since
            heapq.heappop(idle)
        matrix, (least, owner) = matrices[index], idle[0]
        if not matrix.is_cut:
            (owner,) = matrix.parts or (0,)
        elif able := [rank for rank in matrix.parts if loads[rank] == least]:
            owner = max(able, key=lambda rank: (matrix.parts[rank].numel, -rank))
        owners[index] = owner
        loads[owner] += matrix.cost
        heapq.heappush(idle, (loads[owner], owner))
    return tuple(owners)


def _in_buckets(matrices: Sequence[Matrix], owners: Sequence[int], share: int) -> tuple[tuple[int, ...], ...]:
    """`share`: the elements of each owner in one bucket, about. Large matrices are in the first ones: the last bucket,
    with which nothing overlaps, is a small one."""
    found: dict[int, list[int]] = defaultdict(list)
    given: dict[int, int] = defaultdict(int)  # elements, by owner
    for index in sorted(range(len(matrices)), key=lambda index: (-matrices[index].numel, index)):
        found[given[owners[index]] // share].append(index)
        given[owners[index]] += matrices[index].numel
    return tuple(tuple(sorted(found[number])) for number in sorted(found))
