"""The address map of a flat parameter: which element of which parameter lies where, on which rank.

[Note: the flat space]
Parameters lie one after the other in a one-dimensional *flat space*, in declaration order, each on its *span*.
Between spans there may be *alignment padding*; behind the last one *world padding* fills the space up to ``world``
equal *shards*, and rank ``r`` keeps shard ``r``. The whole map is integers: nothing here knows a dtype, a device or a
tensor. Everything that needs an address (collectives, views, state dicts, optimizers, estimates) reads it here and
computes none of its own.

Three spaces have elements, and a `Span` means nothing without saying in which it lies: the flat space, one rank's
shard (flat space minus the shard's start), one parameter (flat space minus the span's start; memory order, see
`ParamSpec`).

A layout is a frozen value that proves itself when made, so a wrong one cannot be passed on. FSDP1's layouts are two
calls of `FlatLayout.pack`: with ``use_orig_params=True`` parameters are aligned and the total is padded to the world
size, with ``False`` neither is done.
"""

from __future__ import annotations

import builtins
import hashlib
from bisect import bisect_right
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import zip_longest
from math import prod

from ...errors import ConfigValueError, InternalError
from .part import Part


@dataclass(frozen=True, slots=True)
class Span:
    """The half-open interval ``[start, stop)`` of elements, ``0 <= start <= stop``."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop:
            raise InternalError(f"a span needs 0 <= start <= stop, found [{self.start}, {self.stop})")

    def __str__(self) -> str:
        return f"[{self.start}, {self.stop})"

    @property
    def numel(self) -> int:
        """Elements in the span."""
        return self.stop - self.start

    @property
    def is_empty(self) -> bool:
        """Whether the span holds no element. An empty span still has a place."""
        return self.start == self.stop

    @property
    def slice(self) -> builtins.slice:
        """The span as an index: ``flat[span.slice]``."""
        return builtins.slice(self.start, self.stop)

    def intersect(self, other: Span) -> Span:
        """What both spans hold. Where they share nothing, an empty span at this span's end nearest to ``other``."""
        start = min(max(self.start, other.start), self.stop)
        return Span(start, max(start, min(self.stop, other.stop)))

    def shift(self, by: int) -> Span:
        """The same interval seen from an origin ``by`` elements earlier (negative ``by``: later)."""
        return Span(self.start + by, self.stop + by)


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """What the layout knows of one original parameter.

    ``stride`` is None for row-major parameters, whose elements lie in the flat space in row-major order. A dense
    parameter that is not row-major (channels_last) gives its stride and lies there in the order its own memory has, so
    that ``as_strided(shape, stride)`` on its span is the parameter. The row-major stride itself is normalised to None.
    A 1x1 convolution in channels_last keeps its stride: kernels read it though no element's place depends on it.
    ``part`` is None unless this is a part of a larger tensor. [Note: parts of wholes]

    Raises:
        ConfigValueError: a negative size, or a stride with gaps or overlaps (an expanded or sliced parameter).
    """

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None = None
    part: Part | None = None

    def __setstate__(self, state: list[object]) -> None:
        for name, value in zip_longest(("name", "shape", "stride", "part"), state):  # older pickles have fewer
            object.__setattr__(self, name, value)

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(int(size) for size in self.shape))
        if any(size < 0 for size in self.shape):
            raise ConfigValueError(f"parameter {self.name!r}: expected sizes of at least 0, found shape {self.shape}")
        if self.stride is None:
            return
        stride = tuple(int(step) for step in self.stride)
        if len(stride) != len(self.shape):
            raise ConfigValueError(
                f"parameter {self.name!r}: expected one stride per dimension of {self.shape}, found {stride}"
            )
        # The stride of a dimension of size one moves nothing, and in an empty parameter no stride does.
        moving = [] if self.numel == 0 else [dim for dim, size in enumerate(self.shape) if size > 1]
        step = 1
        for dim in sorted(moving, key=lambda dim: stride[dim]):
            if stride[dim] != step:
                raise ConfigValueError(
                    f"parameter {self.name!r}: expected its {self.numel} elements to fill their memory once, found "
                    f"shape {self.shape} with stride {stride}; give the module parameter.contiguous() instead"
                )
            step *= self.shape[dim]
        row_major = tuple(prod(max(size, 1) for size in self.shape[dim + 1 :]) for dim in range(len(self.shape)))
        object.__setattr__(self, "stride", None if stride == row_major else stride)

    @property
    def numel(self) -> int:
        """Elements of the parameter: 1 for shape ``()``, 0 where a size is 0."""
        return prod(self.shape)

    @property
    def whole(self) -> ParamSpec:
        """The whole tensor that this is a part of, maybe itself."""
        return self if self.part is None else ParamSpec(self.name, self.part.shape, self.part.stride)


@dataclass(frozen=True, slots=True)
class Owned:
    """The elements of one parameter that lie in one rank's shard.

    ``index`` points into `FlatLayout.params`; ``in_param`` is the interval inside the flattened parameter, ``in_shard``
    the interval inside the shard. Both have the same number of elements.
    """

    index: int
    in_param: Span
    in_shard: Span


@dataclass(frozen=True)
class FlatLayout:
    """Where every parameter of one flat parameter lies, and what each of ``world`` ranks keeps of it.

    Attributes:
        params: the parameters in the order in which they lie.
        spans: for each parameter its span of the flat space.
        world: number of shards (ranks of the shard group).
        numel: elements of the unpadded flat parameter. Alignment padding is part of it, and so is the world padding
            when the total was padded (``pack(pad_total=True)``): what FSDP1 calls the unpadded unsharded size.
        shard_numel: elements of every rank's shard, padding included.
        align: every span starts at a multiple of this many elements.

    Making one costs O(parameters), whatever the world; `owned` costs O(log parameters + what the rank owns).

    Example:
        >>> layout = FlatLayout.pack([ParamSpec("weight", (2, 3)), ParamSpec("bias", (3,))], world=2, align=4)
        >>> [str(span) for span in layout.spans], layout.numel, layout.shard_numel
        (['[0, 6)', '[8, 11)'], 11, 6)
        >>> [(layout.params[part.index].name, str(part.in_param), str(part.in_shard)) for part in layout.owned(1)]
        [('bias', '[0, 3)', '[2, 5)')]
    """

    params: tuple[ParamSpec, ...]
    spans: tuple[Span, ...]
    world: int
    numel: int
    shard_numel: int
    align: int = 1

    @classmethod
    def pack(cls, params: Iterable[ParamSpec], *, world: int, align: int = 1, pad_total: bool = False) -> FlatLayout:
        """Lay ``params`` out in the order given, each at the next multiple of ``align`` elements, in equal shards.

        With ``pad_total`` the unpadded size itself is rounded up to a multiple of ``world``; without it only the shards
        are. FSDP1 packs with ``align=16 // itemsize`` (of the compute dtype) and ``pad_total=True`` under
        ``use_orig_params=True``, and with ``align=1, pad_total=False`` otherwise.

        Raises:
            ConfigValueError: ``world`` or ``align`` below 1.
        """
        if world < 1 or align < 1:
            raise ConfigValueError(f"expected world and align of at least 1, found world={world}, align={align}")
        params = tuple(params)
        spans: list[Span] = []
        end = 0
        for param in params:
            start = _round_up(end, align)
            end = start + param.numel
            spans.append(Span(start, end))
        numel = _round_up(end, world) if pad_total else end
        return cls(params, tuple(spans), world, numel, shard_numel=_round_up(numel, world) // world, align=align)

    def __post_init__(self) -> None:
        """Prove that the spans fit their parameters and that the shards hold every parameter exactly once."""
        if self.world < 1 or self.align < 1:
            raise InternalError(f"a layout needs world >= 1 and align >= 1, found {self.world} and {self.align}")
        if not 0 <= self.numel <= self.padded_numel:
            raise InternalError(f"{self.world} shards of {self.shard_numel} elements do not hold {self.numel} elements")
        end = 0
        for param, span in zip(self.params, self.spans, strict=True):
            if span.numel != param.numel:
                raise InternalError(f"{param.name!r} of {param.numel} elements was given the span {span}")
            if span.start < end:
                raise InternalError(f"{param.name!r} at {span} overlaps what ends at {end}")
            if span.start % self.align:
                raise InternalError(f"{param.name!r} at {span} does not start at a multiple of {self.align}")
            if span.stop > self.numel:
                raise InternalError(f"{param.name!r} at {span} ends behind the layout's {self.numel} elements")
            # Shards are equal and adjoin, so the pieces of a span adjoin too: they cover it exactly once when the first
            # and the last shard they fall into exist and reach around it. No rank needs to be visited for that.
            if not span.is_empty:
                first, last = self.rank_of(span.start), self.rank_of(span.stop - 1)
                if self.shard(first).start > span.start or self.shard(last).stop < span.stop:
                    raise InternalError(f"the shards of ranks {first} to {last} do not cover {param.name!r} at {span}")
            end = span.stop
        names = [param.name for param in self.params]
        if len(set(names)) != len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise InternalError(f"a parameter has one place, but these names occur more than once: {twice}")

    @property
    def padded_numel(self) -> int:
        """Elements of the unsharded buffer: all shards together."""
        return self.shard_numel * self.world

    def shard(self, rank: int) -> Span:
        """The span of the flat space that ``rank`` keeps, padding included."""
        if not 0 <= rank < self.world:
            raise ConfigValueError(f"expected a rank from 0 to {self.world - 1}, found {rank}")
        return Span(rank * self.shard_numel, (rank + 1) * self.shard_numel)

    def rank_of(self, element: int) -> int:
        """The rank whose shard holds ``element`` of the flat space."""
        if not 0 <= element < self.padded_numel:
            raise ConfigValueError(f"expected an element from 0 to {self.padded_numel - 1}, found {element}")
        return element // self.shard_numel

    def owned(self, rank: int) -> tuple[Owned, ...]:
        """What ``rank`` owns of each parameter, in order; parameters of which it owns no element are left out."""
        cached = self._owned_by_rank.get(rank)
        if cached is None:
            cached = self._owned_by_rank[rank] = tuple(self._cut(self.shard(rank)))
        return cached

    def span_in_shard(self, index: int, rank: int) -> Span:
        """Where parameter ``index`` lies in the shard of ``rank``; an empty span inside the shard where it does not."""
        shard = self.shard(rank)
        return shard.intersect(self.spans[index]).shift(-shard.start)

    def span_in_param(self, index: int, rank: int) -> Span:
        """Which elements of parameter `index` are in the shard of ``rank``; ``[0, 0)`` where none is."""
        shared = self.spans[index].intersect(self.shard(rank))
        return Span(0, 0) if shared.is_empty else shared.shift(-self.spans[index].start)

    def unpadded_part(self, rank: int) -> Span:
        """What ``rank`` keeps of the flat space without world padding; ``[0, 0)`` for nothing."""
        shared = self.shard(rank).intersect(Span(0, self.numel))
        return Span(0, 0) if shared.is_empty else shared

    def over(self, world: int) -> FlatLayout:
        """The same flat space, padding included, in ``world`` shards, each of them some of these shards in a row.

        Raises:
            ConfigValueError: ``world`` does not divide this layout's.
        """
        cached = self._over_worlds.get(world)
        if cached is None:
            if world < 1 or self.world % world:
                raise ConfigValueError(f"expected a divisor of the {self.world} shards of a layout, found {world}")
            cached = self._over_worlds[world] = replace(self, world=world, shard_numel=self.padded_numel // world)
        return cached

    def digest(self) -> str:
        """SHA-256 in hex over everything in the layout: equal on two ranks exactly when their layouts are equal."""
        return hashlib.sha256("\n".join(self._facts()).encode()).hexdigest()

    def _facts(self) -> Iterator[str]:
        yield f"world {self.world} numel {self.numel} shard {self.shard_numel} align {self.align}"
        for param, span in zip(self.params, self.spans, strict=True):
            yield f"{param.name!r} {param.shape} {param.stride} {span}{'' if param.part is None else f' {param.part}'}"

    def _cut(self, shard: Span) -> Iterator[Owned]:
        index = bisect_right(self._stops, shard.start)
        while index < len(self.spans) and self.spans[index].start < shard.stop:
            span = self.spans[index]
            part = span.intersect(shard)
            if not part.is_empty:
                yield Owned(index, part.shift(-span.start), part.shift(-shard.start))
            index += 1

    @cached_property
    def gaps(self) -> tuple[Span, ...]:
        """What no parameter covers: alignment padding and world padding, in order."""
        starts = (*(span.start for span in self.spans), self.padded_numel)
        ends = (0, *(span.stop for span in self.spans))
        return tuple(Span(end, start) for end, start in zip(ends, starts, strict=True) if start > end)

    @cached_property
    def _stops(self) -> tuple[int, ...]:
        return tuple(span.stop for span in self.spans)

    @cached_property
    def _owned_by_rank(self) -> dict[int, tuple[Owned, ...]]:
        return {}

    @cached_property
    def _over_worlds(self) -> dict[int, FlatLayout]:
        return {}


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


@dataclass(frozen=True, slots=True)
class ParamInShard:
    """Where a parameter lies in a shard.

    Attributes:
        span: of the shard; empty for a parameter of which the shard holds nothing.
        kind: parameters are taken together where this is equal; None: with no other.
    """

    span: Span
    kind: Hashable


def find_runs(places: Sequence[ParamInShard], *, padding: int) -> list[list[int]]:
    """The places by run: maximal sequences of one kind that only padding divides. Empty places are in none.

    Args:
        places: in the order in which they lie.
        padding: how many elements at most may lie between two of a run.

    Example:
        >>> places = [ParamInShard(Span(0, 6), "a"), ParamInShard(Span(8, 11), "a"), ParamInShard(Span(12, 14), "b")]
        >>> find_runs(places, padding=3)
        [[0, 1], [2]]
    """
    found: list[list[int]] = []
    last: ParamInShard | None = None
    for index, place in enumerate(places):
        if place.span.is_empty:
            continue
        alike = last is not None and place.kind is not None and place.kind == last.kind
        if last is not None and alike and place.span.start - last.span.stop <= padding:
            found[-1].append(index)
        else:
            found.append([index])
        last = place
    return found
