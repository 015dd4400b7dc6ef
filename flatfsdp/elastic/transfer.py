"""The assignment of elements to senders and receivers: pure data, the same on all ranks; and the messages.

[Note: transfers] A rank takes what it has itself. Every other element that it needs comes from one of the ranks that
have it: the one that has sent the least so far. So the traffic is the sum, over all ranks, of what they need and lack.
It takes no memory but the old and the new shards, unless messages go through the memory of another device. [Note:
exchanges]
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist

from ..engine.base.wait_limits import blocked
from ..engine.watchdog.regions import expecting
from ..errors import UsageError
from .exchange import swap
from .holding import KEPT, OWN, Entry, Facts, Holding

MOVES = "moves a model to other ranks"  # of all waits until the last rank has its shards: some are ready long before
LARGEST = 2**24  # bytes of a message


class Move(NamedTuple):
    """Elements `[start, start + numel)` of a tensor, from an entry of a holding of the sender to the receiver."""

    sender: int
    holding: int
    number: int
    receiver: int
    entry: Entry
    start: int
    numel: int

    @property
    def nbytes(self) -> int:
        """Their size."""
        return self.numel * self.entry.dtype.itemsize


class _Source(NamedTuple):
    rank: int
    holding: int
    number: int
    entry: Entry


def assign(
    brought: Sequence[Sequence[Facts]], wanted: Sequence[Sequence[Entry]], stepped: Sequence[frozenset[str]]
) -> list[Move]:
    """All moves, given by rank what each brings, the elements of parameters and buffers that it needs, and the
    parameters of which it needs states, too.

    Raises:
        UsageError: elements that nobody has, or tensors of another shape; on all ranks alike.
    """
    sources: dict[tuple[str, str], list[_Source]] = {}
    for rank, holdings in enumerate(brought):
        for which, facts in enumerate(holdings):
            for number, each in enumerate(facts.entries):
                sources.setdefault((each.name, each.state), []).append(_Source(rank, which, number, each))
    states: dict[str, list[str]] = {}
    for (name, state), known in sources.items():
        known.sort(key=_start)
        states.setdefault(name, []).append(state)
    longest = {key: max(each.entry.numel for each in known) for key, known in sources.items()}
    sent = [0] * len(brought)
    moves: list[Move] = []
    for receiver, wants in enumerate(wanted):
        for want in wants:
            here = states.get(want.name, [])
            if "" not in here:
                raise UsageError(f"regroup(): no rank has the values of {want.name!r}, which rank {receiver} needs")
            for state in here:
                if state and want.name not in stepped[receiver]:
                    continue
                key = want.name, state
                among, its = sources[key], want
                if (entry := among[0].entry).kind == KEPT:
                    its = entry._replace(start=0, numel=prod(entry.shape))
                first = bisect_left(among, its.start - longest[key], key=_start)
                last = bisect_left(among, its.stop, key=_start)
                near = [each for each in among[first:last] if each.entry.stop > its.start]
                if its.kind == OWN:  # those of ranks may differ, so all elements come from one
                    near = [each for each in near if each.entry.numel == its.numel]
                for source, start, end in _pieces_of(its, state, near, receiver, sent):
                    _check(its, source.entry, receiver)
                    made = Move(source.rank, source.holding, source.number, receiver, source.entry, start, end - start)
                    moves.append(made)
                    if source.rank != receiver:
                        sent[source.rank] += made.nbytes
    return moves


def _start(source: _Source) -> int:
    return source.entry.start


def _pieces_of(
    want: Entry, state: str, sources: Sequence[_Source], receiver: int, sent: Sequence[int]
) -> Iterable[tuple[_Source, int, int]]:
    at, stop = want.start, want.stop
    own = [each for each in sources if each.rank == receiver]
    while at < stop:
        mine = [each for each in own if each.entry.start <= at < each.entry.stop]
        if mine:
            chosen = max(mine, key=lambda each: each.entry.stop)
            end = min(stop, chosen.entry.stop)
        else:
            others = [each for each in sources if each.entry.start <= at < each.entry.stop]
            if not others:
                what = f"the state {state!r} of {want.name!r}" if state else repr(want.name)
                raise UsageError(
                    f"regroup(): element {at} of {what}, of shape {want.shape}, is on no rank: the ranks that take "
                    "part must have all of the model between them, or bring holdings that do"
                )
            chosen = min(others, key=lambda each: (want.kind != OWN and sent[each.rank], each.rank))
            end = min([stop, chosen.entry.stop, *(start for each in own if (start := each.entry.start) > at)])
        yield chosen, at, end
        at = end


def _check(want: Entry, entry: Entry, receiver: int) -> None:
    if (entry.shape, entry.stride, entry.kind) != (want.shape, want.stride, want.kind):
        raise UsageError(
            f"regroup(): {want.name!r} has shape {want.shape}{_stride(want.stride)} on rank {receiver}, and shape "
            f"{entry.shape}{_stride(entry.stride)} on another one, or is sharded on one of them only. Build and wrap "
            "the same model on all ranks"
        )


def _stride(stride: tuple[int, ...] | None) -> str:
    return "" if stride is None else f" with strides {stride}"


class Moved(NamedTuple):
    """The bytes that one rank has sent and received.

    Attributes:
        sent, received: to and from other ranks.
        kept: what it had itself.
    """

    sent: int = 0
    received: int = 0
    kept: int = 0


@torch.no_grad()
def transfer(
    moves: Sequence[Move],
    holdings: Sequence[Holding],
    target_of: Callable[[Entry], tuple[torch.Tensor, int]],
    group: dist.ProcessGroup,
    device: torch.device,
) -> Moved:
    """Carry out the moves of this rank, by messages between memory of `device`. `target_of`: 1-D memory for elements of
    a tensor, and the first of these. Called by all ranks of `group`."""
    rank = dist.get_rank(group)

    def here(move: Move) -> torch.Tensor:
        return holdings[move.holding].tensors[move.number].narrow(0, move.start - move.entry.start, move.numel)

    def there(move: Move) -> torch.Tensor:
        memory, first = target_of(move.entry)
        return memory.narrow(0, move.start - first, move.numel)

    kept = [move for move in moves if move.sender == move.receiver == rank]
    going = [move for move in moves if move.sender == rank != move.receiver]
    coming = [(move, there(move)) for move in moves if move.receiver == rank != move.sender]
    for move in kept:
        there(move).copy_(here(move))
    sent = [(move.receiver, part) for move in going for part in _parts(here(move).to(device))]
    arrived = [
        each
        if (each.device, each.dtype) == (device, move.entry.dtype)
        else torch.empty(move.numel, dtype=move.entry.dtype, device=device)
        for move, each in coming
    ]
    arriving = [(move.sender, part) for (move, _), each in zip(coming, arrived, strict=True) for part in _parts(each)]
    swap(sent, arriving, group, partial(_waiting, dist.get_process_group_ranks(group)))
    for (_, target), each in zip(coming, arrived, strict=True):
        if target is not each:
            target.copy_(each)
    return Moved(*(sum(move.nbytes for move in side) for side in (going, [move for move, _ in coming], kept)))


def _parts(memory: torch.Tensor) -> Iterable[torch.Tensor]:
    return memory.view(torch.uint8).split(LARGEST)


@contextmanager
def _waiting(ranks: Sequence[int]) -> Iterator[None]:
    """A context around the wait for one message: time limits hold for each, however long all of them take."""
    with expecting(ranks, f"{MOVES} in regroup()"), blocked():
        yield
