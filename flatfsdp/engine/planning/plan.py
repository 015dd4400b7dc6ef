"""A layout in which no piece ends inside a grain, with little padding: a search over a few candidates.

[Note: plans] Pieces of a segment end at equal distances. A parameter that several of them cut needs a piece that is a
multiple of its grain, so a segment of parameters with different grains needs a common multiple, and its padding is up
to one of these per rank. A segment for each grain needs less, and takes one more of the collectives that are sent
together. So there are three candidates: everything in one segment; first the *blocked* parameters (those with a grain
between one element and everything), then the others; and first those with the largest grain, then the next, and the
others last. In the last two, parameters are first poured into the holes of earlier segments, and what finds no hole has
a segment of its own. The candidate with the least padding is taken; where that differs by less than a thousandth of the
elements, the one with the fewest segments.

In a segment, blocked parameters are placed one after the other: always the one before which the smallest gap is
needed, and of several the one with the largest grain. Then the others go into the first gaps that they fit in, the
largest first. The piece is the smallest one found with which everything fits, among multiples of each grain, of all of
them, and others at larger distances. That is a heuristic: the problem includes bin packing. What it finds is correct in
any case, since `PlannedLayout` verifies all cuts itself.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import lcm
from sys import maxsize

from ...errors import ConfigValueError, did_you_mean
from ..layout.layout import FlatLayout, ParamSpec
from .grains import BUDGET, Blocks, Elements, Grain, Preferred, Rows, Whole
from .planned import PlannedLayout

Item = tuple[int, int]  # the elements of a parameter, and its grain

_ANYWHERE = Elements()
_TIE = 1000  # padding is compared in units of 1 / _TIE of the parameters' elements


def plan(
    params: Iterable[ParamSpec],
    grains: Mapping[str, Grain] | None = None,
    *,
    world: int,
    align: int = 1,
    loads: Sequence[int] = (),
) -> PlannedLayout:
    """A layout of ``params`` in shards of equal size for ``world`` ranks, cut only where ``grains`` allow it.

    Every parameter is contiguous and starts at a multiple of ``align`` elements. Parameters may be in another order
    than given. ``grains`` are by name; parameters without one are cut anywhere, and so are those with a `Preferred` one
    that costs more than `BUDGET`. ``loads`` are the costs of whole parameters that ranks have in other units. The
    result depends on the arguments only, so it is the same on all ranks. [Note: plans]

    Raises:
        ConfigValueError: a grain that does not suit its parameter, or of none; ``world`` or ``align`` below 1.

    Example:
        >>> from flatfsdp.engine.planning.grains import Rows, Whole
        >>> params = [ParamSpec("bias", (3,)), ParamSpec("up", (6, 5)), ParamSpec("down", (3, 4))]
        >>> layout = plan(params, {"up": Rows(2), "down": Whole()}, world=2)
        >>> [(param.name, str(span)) for param, span in zip(layout.params, layout.spans)], layout.shard_numel
        ([('bias', '[0, 3)'), ('up', '[3, 33)'), ('down', '[33, 45)')], 23)
    """
    params = tuple(params)
    if align < 1:
        raise ConfigValueError(f"expected align of at least 1, found {align}")
    wanted, given_up = _affordable(params, dict(grains or {}), world, align)
    items = tuple(_items(params, wanted))
    if world <= 1 or all(grain == 1 for _, grain in items):
        packed = FlatLayout.pack(params, world=world, align=align, pad_total=True)
        members = zip(packed.spans, params, items, strict=True)
        offsets = [(span.start, param, grain) for span, param, (_, grain) in members]
        pieces = [(packed.shard_numel, offsets)]
    else:
        costs = [cost_of(param, wanted.get(param.name)) for param in params]
        pieces = [
            (segment.piece, [(first, params[index], items[index][1]) for first, index in segment.offsets])
            for segment in _balanced(_search(items, world, align), items, costs, world, align, loads)
        ]
    return PlannedLayout.of_pieces(pieces, world=world, align=align, given_up=given_up)


def cost_of(param: ParamSpec, grain: Grain | None) -> int:
    """The cost of a parameter that a `grain` keeps whole, on whatever rank; 0 of another one."""
    grain = grain.grain if isinstance(grain, Preferred) else grain
    return grain.cost(param.shape) if isinstance(grain, Whole) and param.numel else 0


def _affordable(
    params: Sequence[ParamSpec], grains: dict[str, Grain], world: int, align: int
) -> tuple[dict[str, Grain], tuple[str, ...]]:
    """The grains, without those preferred ones that add too much padding, and the names for which these were. The
    fewest are given up, first those of the largest parameters."""
    preferred = [param for param in params if isinstance(grains.get(param.name), Preferred)]
    names = [param.name for param in sorted(preferred, key=lambda param: -param.numel)]

    def without(count: int) -> dict[str, Grain]:
        return {name: grain for name, grain in grains.items() if name not in {*names[:count]}}

    def padding(count: int) -> int:
        items = tuple(_items(params, without(count)))
        return sum(segment.piece for segment in _search(items, world, align)) * world

    fewest, most = 0, len(names) if world > 1 else 0
    allowed = padding(most) + int(BUDGET * sum(param.numel for param in params)) if most else 0
    while fewest < most:
        middle = (fewest + most) // 2
        if padding(middle) <= allowed:
            most = middle
        else:
            fewest = middle + 1
    return without(most), tuple(names[:most])


def cheaper(layout: PlannedLayout, grains: Mapping[str, Grain], *, budget: float = BUDGET) -> str | None:
    """Words on what to choose instead if the padding of ``layout``, which `plan` has made for ``grains``, exceeds
    ``budget``, a part of the parameters' elements; None if it does not, or no grain is left that adds any."""
    params, world = layout.params, layout.world
    total = sum(param.numel for param in params)
    found = layout.padding / max(total, 1)
    kept = {name: grain for name, grain in grains.items() if name not in layout.given_up}
    if found <= budget or not kept:
        return None

    def padding(grains: Mapping[str, Grain], world: int) -> float:
        return plan(params, grains, world=world, align=layout.align).padding / max(total, 1)

    choices = []
    for shards in (world // replicas for replicas in range(2, world) if world % replicas == 0):
        if (its := padding(grains, shards)) <= budget:
            choices.append(f"shards over {shards} ranks with {world // shards} replicas ({its:.2%})")
            break
    finer: dict[str, Grain] = dict(grains)
    while any(map(_finer, finer.values())):
        finer = {name: _finer(grain) or grain for name, grain in finer.items()}
        if (its := padding(finer, world)) <= budget:
            changed = sorted({f"{finer[name]} for {grain}" for name, grain in grains.items() if finer[name] != grain})
            choices.append(f"{', '.join(changed)} ({its:.2%})")
            break
    size, name = max((grain.elements(param), param.name) for param in params if (grain := kept.get(param.name)))
    within = "; ".join(choices) or "no finer grains, and no shards over fewer ranks"
    return (
        f"padding adds {found:.2%} to {total:,} elements in equal shards for {world} ranks, more than {budget:.2%}. "
        f"The largest grain is {grains[name]} of {name!r} with {size:,} elements, where an equal part of all has "
        f"{total // world:,}. Within it are: {within}"
    )


def _finer(grain: Grain) -> Grain | None:
    """The grain of half the size; tiles and what is whole have none, and preferred ones are given up instead."""
    if isinstance(grain, Blocks) and grain.columns is None:
        return None if grain.rows % 2 else Blocks(grain.rows // 2)
    if isinstance(grain, (Elements, Rows)):
        return None if grain.count % 2 else type(grain)(grain.count // 2)
    return None


def _items(params: Sequence[ParamSpec], grains: Mapping[str, Grain]) -> Iterable[Item]:
    names = {param.name for param in params}
    for name in grains:
        if name not in names:
            hint = did_you_mean(name, names)
            raise ConfigValueError(
                f"there is a grain for {name!r}, but no parameter of that name.{hint and ' ' + hint}"
            )
    for param in params:
        yield param.numel, grains.get(param.name, _ANYWHERE).elements(param)


@dataclass
class _Segment:
    """A segment that is being filled.

    Attributes:
        piece: elements of each rank's piece.
        gaps: the intervals without parameters, in order.
        offsets: (first element, index) of each parameter.
        last: the item that was poured last, and the gap before which there is none for an equal one.
    """

    piece: int
    align: int
    gaps: list[tuple[int, int]]
    offsets: list[tuple[int, int]] = field(default_factory=list)
    last: tuple[Item, int] = ((0, 0), 0)

    def put(self, index: int, item: Item, gap: int, first: int) -> None:
        """Place a parameter in a gap."""
        start, stop = self.gaps[gap]
        self.last = (0, 0), 0
        end = first + item[0]
        self.gaps[gap : gap + 1] = [each for each in ((start, first), (end, stop)) if each[0] < each[1]]
        self.offsets.append((first, index))

    def pour(self, index: int, item: Item, rank: int | None = None) -> bool:
        """Place a parameter in the first gap that it fits in, in the piece of a `rank` if one is given; False if there
        is none."""
        if not item[0]:
            self.offsets.append((0, index))
            return True
        low, high, begin = 0, maxsize, self.last[1] if self.last[0] == item else 0
        if rank is not None:
            low, high = rank * self.piece, (rank + 1) * self.piece
            begin = max(0, bisect_right(self.gaps, (low, high)) - 1)
        for gap in range(begin, len(self.gaps)):
            start, stop = max(self.gaps[gap][0], low), min(self.gaps[gap][1], high)
            if start >= high:
                break
            first = _first_fit(start, stop, item, self.piece, self.align) if stop - start >= item[0] else None
            if first is not None:
                self.put(index, item, gap, first)
                self.last = (item, gap) if rank is None else self.last
                return True
        if rank is None:
            self.last = item, len(self.gaps)
        return False


def _first_fit(start: int, stop: int, item: Item, piece: int, align: int) -> int | None:
    """The first position for `item` in `[start, stop)` at which pieces end at multiples of its grain."""
    numel, grain = item
    first = _round_up(start, align)
    while first + numel <= stop:
        end = (first // piece + 1) * piece
        if grain == 1 or first + numel <= end:
            return first
        # The piece ends after this many grains; if pieces are no multiple of it, only this one may end inside. Pieces
        # are aligned, so alignment repeats after that many grains.
        most, fewest = (end - first) // grain, 1 if piece % grain == 0 else max(1, -(-(numel - piece) // grain))
        for grains in range(most, max(fewest - 1, most - align), -1):
            shifted = end - grains * grain
            if shifted % align == 0:
                return shifted if shifted + numel <= stop else None
        if numel > piece and first == end - piece:
            return None  # a later piece is no better
        first = end
    return None


@dataclass(frozen=True)
class _Contents:
    """The parameters of one segment.

    Attributes:
        alike: the indices of blocked ones, by their elements and grain.
        others: the indices of the others, those first that are harder to place.
    """

    items: Sequence[Item]
    alike: dict[Item, list[int]]
    others: list[int]

    @classmethod
    def of(cls, items: Sequence[Item], indices: Iterable[int]) -> _Contents:
        """The parameters with these indices."""
        alike: dict[Item, list[int]] = {}
        others = []
        for index in _hardest_first(items, indices):
            if _is_blocked(items[index]):
                alike.setdefault(items[index], []).append(index)
            else:
                others.append(index)
        return cls(items, alike, others)

    def fill(
        self, piece: int, world: int, align: int, costs: Sequence[int] = (), loads: Sequence[int] = ()
    ) -> _Segment | None:
        """A segment with pieces of `piece` elements; None if the parameters do not fit in it. With `costs`, those that
        have one are first, the largest on the rank with the smallest of the `loads` that has room for it."""
        segment = _Segment(piece, align, [(0, piece * world)] if piece else [])
        waiting = {item: indices.copy() for item, indices in self.alike.items()}
        left = sum(item[0] * len(indices) for item, indices in waiting.items())
        while waiting:
            start, stop = segment.gaps[-1] if segment.gaps else (0, 0)
            nearest: tuple[int, int, int] | None = None
            for numel, grain in waiting:
                first = _first_fit(start, stop, (numel, grain), piece, align)
                if first is not None and (nearest is None or (first, -grain, -numel) < nearest):
                    nearest = first, -grain, -numel
            if nearest is None or nearest[0] + left > stop:
                return None
            item = -nearest[2], -nearest[1]
            segment.put(waiting[item].pop(), item, len(segment.gaps) - 1, nearest[0])
            left -= item[0]
            if not waiting[item]:
                del waiting[item]
        costly = sorted((index for index in self.others if costs and costs[index]), key=lambda index: -costs[index])
        idle = [(load, rank) for rank, load in enumerate(loads)]
        heapq.heapify(idle)
        for index in costly:
            full = []
            while idle and not segment.pour(index, self.items[index], idle[0][1]):
                full.append(heapq.heappop(idle))
            if not idle:
                return None
            heapq.heapreplace(idle, (idle[0][0] + costs[index], idle[0][1]))
            for each in full:
                heapq.heappush(idle, each)
        others = (index for index in self.others if not costs or not costs[index])
        return segment if all(segment.pour(index, self.items[index]) for index in others) else None


def _is_blocked(item: Item) -> bool:
    return 1 < item[1] < item[0]


def _hardest_first(items: Sequence[Item], indices: Iterable[int]) -> list[int]:
    """The order in which parameters go into gaps: those that may be cut anywhere last, large ones first."""
    return sorted(indices, key=lambda index: (items[index][1] == 1, -items[index][0]))


def _smallest(items: Sequence[Item], indices: Sequence[int], world: int, align: int, below: int) -> _Segment | None:
    """A segment for the parameters with these indices, with the smallest pieces found; None if all that are tried have
    at least `below` elements."""
    contents = _Contents.of(items, indices)
    least = max(-(-sum(items[i][0] for i in indices) // world), *(min(items[i]) for i in indices))
    whole = sorted((items[i][0] for i in indices if items[i][1] >= items[i][0]), reverse=True)
    for count in range(
        1, -(-len(whole) // world)
    ):  # of the first `count * world + 1`, some rank has one more than that
        least = max(least, sum(whole[count * world - count : count * world + 1]))
    grains = {grain for _, grain in contents.alike}
    best: _Segment | None = None
    for unit in sorted({lcm(each, align) for each in (lcm(*grains), *grains, 1)}, reverse=True):
        failed, fits, piece = 0, False, _round_up(least, unit)
        while piece < below:
            segment = contents.fill(piece, world, align)
            if segment is not None:
                best, below, fits = segment, piece, True
            else:
                failed = piece
            if not fits:  # in small steps at first; later as large as a quarter of what has been tried
                piece = _round_up(piece + max(unit, least // _TIE, (piece - least) // 4), unit)
            elif failed and below - failed > least // _TIE:
                piece = _round_up(-(-(failed + below) // 2), unit)  # `below`, at last
            else:
                break
    return best


@lru_cache(maxsize=256)
def _search(items: tuple[Item, ...], world: int, align: int) -> tuple[_Segment, ...]:
    """The segments for these parameters. The layers of a model have equal ones."""
    blocked = [index for index, item in enumerate(items) if _is_blocked(item)]
    others = [index for index, item in enumerate(items) if not _is_blocked(item)]
    by_grain: dict[int, list[int]] = {}
    for index in sorted(blocked, key=lambda index: -items[index][1]):
        by_grain.setdefault(items[index][1], []).append(index)
    total = sum(numel for numel, _ in items)
    best: list[_Segment] = []
    aligned = sum(_round_up(numel, align) for numel, _ in items)
    below = 4 * (aligned + lcm(align, *by_grain)) + 1  # everything fits in the first piece
    candidates = [[blocked + others], [blocked, others], [*by_grain.values(), others]]
    for groups in candidates if blocked else candidates[:1]:
        segments: list[_Segment] = []
        room = below
        for group in groups:
            remaining = _hardest_first(items, group)
            remaining = [index for index in remaining if not any(one.pour(index, items[index]) for one in segments)]
            segment = _smallest(items, remaining, world, align, room) if remaining else None
            if segment is not None:
                segments.append(segment)
                room -= segment.piece
            elif remaining:
                break
        else:
            best, shard = segments, sum(segment.piece for segment in segments)
            below = shard - total // world // _TIE  # for more segments
            if below * world <= total:
                break
    return tuple(best)


def _balanced(
    found: Sequence[_Segment],
    items: Sequence[Item],
    costs: Sequence[int],
    world: int,
    align: int,
    loads: Sequence[int],
) -> list[_Segment]:
    """Segments with the same pieces as those that were `found`, in which the largest sum of a rank's `loads` and the
    `costs` of its whole parameters is smaller, if there is such an arrangement."""
    chosen: list[_Segment] = []
    sums = [*loads] or [0] * world
    for segment in found:
        contents = _Contents.of(items, (index for _, index in segment.offsets))
        other = contents.fill(segment.piece, world, align, costs, sums) if any(costs) else None
        ways = [(each, _with_costs(each, costs, sums)) for each in (segment, other) if each is not None]
        best, sums = min(ways, key=lambda way: max(way[1]))
        best.offsets.sort(key=lambda each: (each[0], items[each[1]][0]))
        chosen.append(best)
    return chosen


def _with_costs(segment: _Segment, costs: Sequence[int], loads: Sequence[int]) -> list[int]:
    sums = [*loads]
    for first, index in segment.offsets:
        if costs[index]:
            sums[first // segment.piece] += costs[index]
    return sums


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
