"""Norms of gradients that have the same bits on any number of ranks.

[Note: tiles] A parameter's elements, in the order in which they are stored, are divided into *tiles* of a fixed number,
wherever shards end. The powers of a tile are added by halves, elementwise: the first half of them and the second, then
the halves of these sums. A rank does so for the tiles that it holds completely. Of those that are cut, and of the last
one of a parameter, which zeros fill up, ranks exchange the elements; each is a number on one rank and zero on the
others, so that their sum is exact in any order, and so is that of the tiles' sums, which ranks exchange with them. All
ranks then add up the same list, again by halves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from ..comm.transport import Transport
from ..flat.flat_param import FlatParamHandle
from ..flat.layout_views import dense
from ..runtime.model import Model
from ..transports.blocking import all_reduce_now

TILE = 512  # elements; a power of two

Power = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Piece:
    """This rank's elements of one parameter's gradient, from `start` on: 1-D, None for zeros.

    Attributes:
        numel: of the parameter.
        cuts: where shards of it end, the same on all ranks.
    """

    values: torch.Tensor | None
    start: int
    numel: int
    cuts: frozenset[int]

    @property
    def tiles(self) -> int:
        """The number of its tiles."""
        return -(-self.numel // TILE)

    @property
    def ragged(self) -> list[int]:
        """The tiles whose elements ranks exchange: those that are cut, and the last one if it is not full."""
        ends = {*self.cuts, self.numel}
        return sorted({end // TILE for end in ends if end % TILE})


def power_sum(
    models: Sequence[Model], chosen: Mapping[int, torch.Tensor], p: float, dtype: torch.dtype
) -> torch.Tensor:
    """The sum of |g|^p over the gradients of the `chosen` parameters, by their ids, in units of `models` or outside of
    them; for p = 0 the number of non-zeros. In `dtype`. Collective over the shard axis. [Note: tiles]

    Precondition: all units are sharded over the same ranks.
    """
    split: list[Piece] = []
    whole: list[Piece] = []
    managed: set[int] = set()
    axis: Transport | None = None
    for unit in [unit for model in models for unit in model.units]:
        for handle in unit.handles:
            managed.update(map(id, handle.parameters))
            pieces = split
            if handle.is_unsharded_at_rest:
                pieces = whole
            elif handle.trainable_indices():
                axis = unit.axes.transports_of(handle).gather
            pieces += _pieces(handle, chosen)
    for key, parameter in chosen.items():
        if key not in managed and parameter.grad is not None:
            values = parameter.grad.detach().reshape(-1)
            whole.append(Piece(values, 0, values.numel(), frozenset()))
    device = models[0].resources.device.device
    power = _power(p)
    sums = [_sums(whole, None, power, device, dtype), _sums(split, axis, power, device, dtype)]
    return by_halves(torch.cat(sums).unsqueeze(0)).view(())


def _pieces(handle: FlatParamHandle, chosen: Mapping[int, torch.Tensor]) -> Iterator[Piece]:
    layout, grads = handle.layout, handle.face.grads_of_leaves()
    for index in sorted(handle.trainable_indices()):
        if id(handle.face.holder_of(index)) not in chosen or not layout.params[index].numel:
            continue
        owned = [layout.span_in_param(index, rank) for rank in range(layout.world)]
        cuts = frozenset(end for span in owned if not span.is_empty for end in (span.start, span.stop))
        grad = grads[index] if grads else None
        own = owned[handle.rank]
        values = None if grad is None or own.is_empty else dense(grad.detach())
        yield Piece(values, own.start, layout.params[index].numel, cuts)


def _power(p: float) -> Power:
    if p == 2:
        return torch.square
    if p == 1:
        return torch.abs
    if p == 0:
        return lambda values: (values != 0).to(values.dtype)
    return lambda values: values.abs().pow(p)


def _sums(
    pieces: Sequence[Piece], axis: Transport | None, power: Power, device: torch.device, dtype: torch.dtype
) -> torch.Tensor:
    """The sums of all tiles of `pieces`; on `axis`, if there is one, ranks have different elements of them."""
    starts = _starts(piece.tiles for piece in pieces)
    ragged = [(number, tile) for number, piece in enumerate(pieces) for tile in piece.ragged]
    row_of = {where: row for row, where in enumerate(ragged)}
    count = sum(piece.tiles for piece in pieces)
    both = torch.zeros(count + len(ragged) * TILE, dtype=dtype, device=device)
    sums, rows = both[:count], both[count:].view(-1, TILE)
    for number, (piece, first) in enumerate(zip(pieces, starts, strict=True)):
        if piece.values is None:
            continue
        powers = power((piece.values.abs() if piece.values.is_complex() else piece.values).to(device, dtype))
        start, stop = piece.start, piece.start + powers.numel()
        low, high = min(-(-start // TILE) * TILE, stop), max(stop // TILE * TILE, start)
        if low < high:
            tiles = powers[low - start : high - start].view(-1, TILE)
            sums[first + low // TILE : first + high // TILE] = by_halves(tiles)
        for begin, end in ((start, min(low, stop)), (max(high, low), stop)):
            if begin < end:
                row = rows[row_of[number, begin // TILE]]
                row[begin % TILE : begin % TILE + end - begin] = powers[begin - start : end - start]
    if axis is not None:
        all_reduce_now(axis, both)
    if ragged:
        sums[[starts[number] + tile for number, tile in ragged]] = by_halves(rows)
    return sums


def _starts(counts: Iterable[int]) -> list[int]:
    found, end = [], 0
    for count in counts:
        found.append(end)
        end += count
    return found


def by_halves(rows: torch.Tensor) -> torch.Tensor:
    """The sum of each row, in an order that depends on the number of columns alone."""
    width = rows.shape[1]
    while width > 1:
        half = (width + 1) // 2
        added = rows[:, : width - half] + rows[:, half:width]
        rows = torch.cat([added, rows[:, width - half : half]], 1) if width % 2 else added
        width = half
    return rows[:, 0] if width else rows.new_zeros(len(rows))
