"""Norms of gradients that have the same bits on any number of ranks.

[Note: tiles] A parameter's elements, in the order in which they are stored, are divided into *tiles* of a fixed number,
wherever shards end. The powers of a tile are added by halves, elementwise: the first half of them and the second, then
the halves of these sums. A rank does so for the tiles that it holds completely. Of those that are cut, and of the last
one of a parameter, which zeros fill up, ranks exchange the elements; each is a number on one rank and zero on the
others, so that their sum is exact in any order, and so is that of the tiles' sums, which ranks exchange with them. All
ranks then add up the same list, again by halves.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import itemgetter
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ..base import _torch
from ..base.fqns import clean
from ..comm.transport import Transport
from ..flat.flat_param import FlatParamHandle
from ..flat.layout_views import dense
from ..runtime.model import Model
from ..transports.blocking import all_reduce_now

TILE = 512  # elements; a power of two
TOGETHER = 2**20  # elements

Power = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, eq=False)
class Interval:
    """This rank's elements of one parameter, from `start` to before `stop`.

    Attributes:
        tiles: the number of the parameter's tiles.
        ragged: those whose elements ranks exchange, the same on all ranks: those that are cut, and the last one if it
            is not full.
    """

    start: int
    stop: int
    tiles: int
    ragged: tuple[int, ...]

    @classmethod
    def of(cls, start: int, stop: int, numel: int, ends: Iterable[int]) -> Interval:
        """`ends`: where shards of the parameter, of `numel` elements, begin or end."""
        ragged = {end // TILE for end in (*ends, numel) if end % TILE}
        return cls(start, stop, -(-numel // TILE), tuple(sorted(ragged)))

    @property
    def own_tiles(self) -> range:
        """The tiles of which this rank has elements."""
        return range(self.start // TILE, -(-self.stop // TILE))


@dataclass(frozen=True, eq=False)
class Piece:
    """The elements of a gradient in one interval: 1-D, None for zeros."""

    values: torch.Tensor | None
    interval: Interval


_intervals: WeakKeyDictionary[FlatParamHandle, list[Interval]] = WeakKeyDictionary()


def power_sum(
    models: Sequence[Model], chosen: Container[int], outside: Iterable[torch.Tensor], p: float, dtype: torch.dtype
) -> torch.Tensor:
    """The sum of |g|^p over the gradients of the parameters with `chosen` ids in units of `models`, and over gradients
    that are `outside` of them ([Note: tiles]); for p = 0 the number of non-zeros. In `dtype`. Collective over the shard
    axes.

    All parameters have their positions in the sum, in the order of their names, however modules are wrapped and split;
    those outside come last.
    """
    found: list[tuple[Transport | None, Piece]] = []
    for model in models:
        named: list[tuple[str, Transport | None, Piece]] = []
        for unit in model.units:
            for handle in unit.handles:
                axis = None if handle.is_unsharded_at_rest else unit.axes.transports_of(handle).gather
                pieces = _pieces(handle, chosen)
                named += [(clean(unit.entries.fqn(name)), axis, piece) for name, piece in pieces]
        found += [(axis, piece) for _, axis, piece in sorted(named, key=itemgetter(0))]
    for grad in outside:
        found.append((None, Piece(grad.detach().reshape(-1), Interval.of(0, grad.numel(), grad.numel(), ()))))
    device, power = models[0].resources.device.device, _power(p)
    sums: list[torch.Tensor] = [torch.empty(0)] * len(found)
    by_group: dict[Any, list[int]] = {}
    for number, (axis, _) in enumerate(found):
        by_group.setdefault(axis and axis.group.process_group, []).append(number)
    for numbers in by_group.values():
        axis = found[numbers[0]][0]
        each = _sums([found[number][1] for number in numbers], axis, power, device, dtype)
        for number, of_tiles in zip(numbers, each, strict=True):
            sums[number] = of_tiles
    if not sums:
        return torch.zeros((), dtype=dtype, device=device)
    return by_halves(torch.cat(sums).unsqueeze(0)).view(())


def _pieces(handle: FlatParamHandle, chosen: Container[int]) -> Iterator[tuple[str, Piece]]:
    """The pieces of all parameters of one handle, with their names in its unit; zeros for those that are not `chosen`,
    which may be others on other ranks."""
    if (intervals := _intervals.get(handle)) is None:
        intervals = _intervals[handle] = [_interval_of(handle, index) for index in range(len(handle.leaves))]
    grads = handle.face.grads_of_leaves()
    for index, (spec, interval) in enumerate(zip(handle.layout.params, intervals, strict=True)):
        grad = grads[index] if grads and id(handle.face.holder_of(index)) in chosen else None
        yield (
            spec.name,
            Piece(None if grad is None or interval.start == interval.stop else dense(grad.detach()), interval),
        )


def _interval_of(handle: FlatParamHandle, index: int) -> Interval:
    layout = handle.layout
    owned = [layout.span_in_param(index, rank) for rank in range(layout.world)]
    own, numel = owned[handle.rank], layout.params[index].numel
    return Interval.of(own.start, own.stop, numel, [end for s in owned if not s.is_empty for end in (s.start, s.stop)])


def _power(p: float) -> Power:
    """|x|^p by products alone, for a whole number p: they are rounded alike wherever an element lies in a tensor, which
    `pow` is not."""

    def power(values: torch.Tensor) -> torch.Tensor:
        if p == 0:
            return (values != 0).to(values.dtype)
        left, square, found = int(p), values.abs(), None
        while True:
            if left & 1:
                found = square if found is None else found * square
            left >>= 1
            if not left:
                return square if found is None else found
            square = square * square

    return power


def _sums(
    pieces: Sequence[Piece], axis: Transport | None, power: Power, device: torch.device, dtype: torch.dtype
) -> Sequence[torch.Tensor]:
    """The sums of the tiles of each of `pieces`; on `axis`, if there is one, ranks have different elements of them."""
    starts = [0, *accumulate(piece.interval.tiles for piece in pieces)]
    ragged = [(number, tile) for number, piece in enumerate(pieces) for tile in piece.interval.ragged]
    row_of = {where: row for row, where in enumerate(ragged)}
    count = starts[-1]
    both = torch.zeros(count + len(ragged) * TILE, dtype=dtype, device=device)
    sums, rows = both[:count], both[count:].view(-1, TILE)
    for numbers in _together(pieces):
        tiles = power(_in_tiles([pieces[number] for number in numbers], device, dtype)).view(-1, TILE)
        whole: dict[int, int] = {}  # the position in `sums` of each row of `tiles`; cut: in `rows`
        cut: dict[int, int] = {}
        where = [(number, tile) for number in numbers for tile in pieces[number].interval.own_tiles]
        for row, (number, tile) in enumerate(where):
            if (exchanged := row_of.get((number, tile))) is None:
                whole[row] = starts[number] + tile
            else:
                cut[row] = exchanged
        sums[[*whole.values()]] = by_halves(tiles)[[*whole]]
        rows[[*cut.values()]] = tiles[[*cut]]
    if axis is not None:
        all_reduce_now(axis, both)
    if ragged:
        sums[[starts[number] + tile for number, tile in ragged]] = by_halves(rows)
    return sums.split([piece.interval.tiles for piece in pieces])


def _together(pieces: Sequence[Piece]) -> Iterator[list[int]]:
    """The positions of those of `pieces` that have values, in groups of about `TOGETHER` elements."""
    group, size = [], 0
    for number, piece in enumerate(pieces):
        if piece.values is None:
            continue
        group.append(number)
        size += len(piece.interval.own_tiles) * TILE
        if size >= TOGETHER:
            yield group
            group, size = [], 0
    if group:
        yield group


def _in_tiles(pieces: Sequence[Piece], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """The magnitudes of the elements of `pieces`, with zeros in the rest of the tiles that they begin and end in."""
    sizes: list[int] = []
    for interval in (piece.interval for piece in pieces):
        gap = interval.start % TILE
        numel = interval.stop - interval.start
        sizes += [gap, numel, len(interval.own_tiles) * TILE - gap - numel]
    tiles = torch.zeros(sum(sizes), dtype=dtype, device=device)
    values = [_magnitudes(piece.values.to(device), dtype) for piece in pieces if piece.values is not None]
    _torch.foreach_copy_([*tiles.split(sizes)[1::3]], values)
    return tiles


def _magnitudes(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if not values.is_complex():
        return values.to(dtype)
    real, imaginary = values.real.to(dtype), values.imag.to(dtype)
    return (real * real + imaginary * imaginary).sqrt()  # `abs` rounds by where an element lies


def by_halves(rows: torch.Tensor) -> torch.Tensor:
    """The sum of each row, in an order that depends on the number of columns alone."""
    width = rows.shape[1]
    while width > 1:
        half = (width + 1) // 2
        added = rows[:, : width - half] + rows[:, half:width]
        rows = torch.cat([added, rows[:, width - half : half]], 1) if width % 2 else added
        width = half
    return rows[:, 0] if width else rows.new_zeros(len(rows))
