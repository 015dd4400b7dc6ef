"""The assignment of elements to senders and receivers: pure data, the same on all ranks; and the messages.

[Note: transfers] A rank takes what it has itself. Every other element that it needs comes from one of the ranks that
have it: the one that has sent the least so far. So the traffic is the sum, over all ranks, of what they need and lack.
It goes in rounds, in which no rank sends or receives more than `LARGEST` bytes: that is all memory it takes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist

from ..engine.base.wait_limits import blocked
from ..engine.watchdog.regions import expecting
from ..errors import UsageError
from .holding import KEPT, OWN, Entry, Facts, Holding

LARGEST = 2**24  # bytes that a rank sends, or receives, in one round


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
                choose = _whole_of if its.kind == OWN else _pieces_of
                for source, start, end in choose(its, state, near, receiver, sent):
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
            chosen = min(others, key=lambda each: (sent[each.rank], each.rank))
            end = min([stop, chosen.entry.stop, *(start for each in own if (start := each.entry.start) > at)])
        yield chosen, at, end
        at = end


def _whole_of(
    want: Entry, state: str, sources: Sequence[_Source], receiver: int, sent: Sequence[int]
) -> Iterable[tuple[_Source, int, int]]:
    complete = [each for each in sources if each.entry.numel == want.numel]
    if want.numel and not complete:
        raise UsageError(f"regroup(): no rank has all of {want.name!r}, which each rank has whole")
    if want.numel:
        chosen = min(complete, key=lambda each: (each.rank != receiver, each.rank))
        yield chosen, 0, want.numel


def _check(want: Entry, entry: Entry, receiver: int) -> None:
    if (entry.shape, entry.stride, entry.kind) != (want.shape, want.stride, want.kind):
        raise UsageError(
            f"regroup(): {want.name!r} has shape {want.shape}{_stride(want.stride)} on rank {receiver}, and shape "
            f"{entry.shape}{_stride(entry.stride)} on another one, or is sharded on one of them only. Build and wrap "
            "the same model on all ranks"
        )


def _stride(stride: tuple[int, ...] | None) -> str:
    return "" if stride is None else f" with strides {stride}"


def rounds(moves: Iterable[Move], most: int) -> list[list[Move]]:
    """The moves between different ranks, cut and dealt out to rounds: in each, no rank sends or receives more than
    `most` bytes."""
    going: defaultdict[tuple[int, int], int] = defaultdict(int)  # bytes by rank and round
    coming: defaultdict[tuple[int, int], int] = defaultdict(int)
    begun: defaultdict[tuple[str, int], int] = defaultdict(int)  # the rounds before are full
    made: list[list[Move]] = []
    for move in moves:
        if move.sender == move.receiver:
            continue
        step = max(1, most // (4 * move.entry.dtype.itemsize))  # pieces that fill rounds well
        for start in range(move.start, move.start + move.numel, step):
            piece = move._replace(start=start, numel=min(step, move.start + move.numel - start))
            at = max(begun["from", piece.sender], begun["to", piece.receiver])
            while going[piece.sender, at] + piece.nbytes > most or coming[piece.receiver, at] + piece.nbytes > most:
                at += 1
            going[piece.sender, at] += piece.nbytes
            coming[piece.receiver, at] += piece.nbytes
            for kind, rank, load in (("from", piece.sender, going), ("to", piece.receiver, coming)):
                while load[rank, begun[kind, rank]] >= most:
                    begun[kind, rank] += 1
            made += [[] for _ in range(at + 1 - len(made))]
            made[at].append(piece)
    return made


class Moved(NamedTuple):
    """The bytes that one rank has sent and received, and in how many rounds.

    Attributes:
        sent, received: to and from other ranks.
        kept: what it had itself.
        rounds: of messages.
    """

    sent: int = 0
    received: int = 0
    kept: int = 0
    rounds: int = 0


@torch.no_grad()
def transfer(
    moves: Sequence[Move],
    holdings: Sequence[Holding],
    target_of: Callable[[Entry], tuple[torch.Tensor, int]],
    group: dist.ProcessGroup,
    device: torch.device,
) -> Moved:
    """Carry out the moves of this rank, by messages from memory of `device`. `target_of`: 1-D memory for elements of a
    tensor, and the first of these. Collective over `group`, an all-to-all in each round."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)

    def there(move: Move) -> torch.Tensor:
        memory, first = target_of(move.entry)
        return memory.narrow(0, move.start - first, move.numel)

    def here(move: Move) -> torch.Tensor:
        return holdings[move.holding].tensors[move.number].narrow(0, move.start - move.entry.start, move.numel)

    kept = [move for move in moves if move.sender == move.receiver == rank]
    for move in kept:
        there(move).copy_(here(move))
    dealt = rounds(moves, LARGEST)
    members = dist.get_process_group_ranks(group)
    going_all = coming_all = 0
    for each in dealt:
        going = [[move for move in each if move.sender == rank and move.receiver == to] for to in range(world)]
        coming = [[move for move in each if move.receiver == rank and move.sender == by] for by in range(world)]
        sizes = [[sum(move.nbytes for move in of_rank) for of_rank in side] for side in (going, coming)]
        sent = _bytes([here(move) for of_rank in going for move in of_rank], device)
        arrived = torch.empty(sum(sizes[1]), dtype=torch.uint8, device=device)
        with expecting(members, "moves a model to other ranks in regroup()"), blocked():
            work = dist.all_to_all_single(arrived, sent, sizes[1], sizes[0], group=group, async_op=True)
            work.wait()
        at = 0
        for move in (move for of_rank in coming for move in of_rank):
            piece = arrived[at : at + move.nbytes]
            if at % (dtype := move.entry.dtype).itemsize:
                piece = piece.clone()  # only there it can be seen as numbers
            there(move).copy_(piece.view(dtype))
            at += move.nbytes
        going_all, coming_all = going_all + sum(sizes[0]), coming_all + sum(sizes[1])
    return Moved(going_all, coming_all, sum(move.nbytes for move in kept), len(dealt))


def _bytes(pieces: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    flat = [piece.view(torch.uint8).to(device) for piece in pieces]
    return torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8, device=device)
