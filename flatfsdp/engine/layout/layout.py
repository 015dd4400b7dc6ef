"""The address map of a flat parameter: the positions of all parameters' elements, and the ranks that own them.

[Note: the flat space]
Parameters are placed one after the other in a one-dimensional *flat space*, in declaration order, each on its *span*.
Between spans there may be *alignment padding*. The space is a sequence of *segments*, each extended by *world padding*
and split evenly over ``world`` ranks: rank ``r`` has *piece* ``r`` of each, and its *shard* is the concatenation of
these pieces. The map consists of integers only, without dtypes, devices or tensors. All code that needs an address
(collectives, views, state dicts, optimizers, estimates) reads it here, and computes none of its own.

[Note: pieces] A *piece* is what one rank has of something that ranks split: a segment, a parameter, a tensor in an
exchange. With one segment, shards are equal intervals of the flat space, and parameters are split anywhere:
FSDP1's layout, with the least padding. With one segment per parameter, whose pieces are complete rows, each rank has
consecutive rows of every parameter, as ``torch.chunk`` divides them: the meaning of FSDP2's ``Shard(0)``. In both cases
a rank owns one interval of each parameter, and parameters are contiguous in the flat space. Between segments there may
be alignment padding that is in no shard.

A `Span` is an interval of one of three spaces, which has to be known from the context: the flat space, one rank's
shard, or one parameter (flat space minus the span's start; memory order, see `ParamSpec`).

A layout is a frozen value that is verified when it is created, so an invalid one cannot be passed on. FSDP1's layouts
are two calls of `FlatLayout.pack`: with ``use_orig_params=True`` parameters are aligned and the total is padded to the
world size, with ``False`` neither is done.
"""

from __future__ import annotations

import builtins
import hashlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import Any

from ...errors import ConfigValueError, InternalError


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
        """The number of elements in the span."""
        return self.stop - self.start

    @property
    def is_empty(self) -> bool:
        """Whether the span has no elements. An empty span still has a position."""
        return self.start == self.stop

    @property
    def slice(self) -> builtins.slice:
        """The span as an index: ``flat[span.slice]``."""
        return builtins.slice(self.start, self.stop)

    def intersect(self, other: Span) -> Span:
        """The elements in both spans. If there are none, an empty span at this span's end nearest to ``other``."""
        start = min(max(self.start, other.start), self.stop)
        return Span(start, max(start, min(self.stop, other.stop)))

    def shift(self, by: int) -> Span:
        """The same interval relative to an origin that is ``by`` elements earlier (negative ``by``: later)."""
        return Span(self.start + by, self.stop + by)


@dataclass(frozen=True, slots=True)
class Part:
    """The part of a larger tensor that a parameter is. Its text is included in digests. [Note: parts of wholes]

    Attributes:
        shape: the shape of the whole; stride: the stride of the whole, None if that is row-major.
        ranges: for each dimension the ranges that the part consists of, in the order in which they are stored: each
            as (first, length).
        copy: the index of this copy among those of the same part.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...] | None
    ranges: tuple[tuple[tuple[int, int], ...], ...]
    copy: int = 0

    def __post_init__(self) -> None:
        for size, ranges in zip(self.shape, self.ranges, strict=True):
            if any(first < 0 or length < 1 or first + length > size for first, length in ranges):
                raise InternalError(f"ranges {ranges} of a dimension of {size} elements")


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """The description of one original parameter.

    ``stride`` is None for row-major parameters, whose elements are in row-major order in the flat space. A dense
    parameter that is not row-major (channels_last) has its stride here, and its elements are in the order of its own
    memory, so that ``as_strided(shape, stride)`` on its span is the parameter. A row-major stride is normalized to
    None. A 1x1 convolution in channels_last keeps its stride: kernels read it although no element's position depends on
    it. ``part`` is None unless this is a part of a larger tensor. [Note: parts of wholes]

    Raises:
        ConfigValueError: a negative size, or a stride with gaps or overlaps (an expanded or sliced parameter).
    """

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None = None
    part: Part | None = None

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
        """The number of elements: 1 for shape ``()``, 0 if a size is 0."""
        return prod(self.shape)

    @property
    def whole(self) -> ParamSpec:
        """The whole tensor of which this is a part; itself if it is not a part."""
        return self if self.part is None else ParamSpec(self.name, self.part.shape, self.part.stride)

    @property
    def order(self) -> tuple[int, ...]:
        """The dimensions from the slowest to the fastest in memory; (0, 1, ...) for row-major parameters."""
        dims = range(len(self.shape))
        if self.stride is None:
            return tuple(dims)
        stride = self.stride
        # A dimension of size one with the same stride as another one counts as the faster of the two.
        return tuple(sorted(dims, key=lambda dim: (-stride[dim], self.shape[dim] == 1, dim)))

    @property
    def rows(self) -> int:
        """The number of equal contiguous slices along the slowest dimension in memory."""
        return self.shape[self.order[0]] if self.shape else 1


@dataclass(frozen=True, slots=True)
class Owned:
    """The elements of one parameter in one rank's shard.

    ``index`` is the parameter's index in `FlatLayout.params`; ``in_param`` is the interval in the flattened parameter,
    ``in_shard`` the interval in the shard. Both have the same number of elements.
    """

    index: int
    in_param: Span
    in_shard: Span


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of the flat space that is split evenly over the ranks. [Note: pieces]

    Attributes:
        span: its interval of the flat space, including padding; with equally many elements for each rank.
        members: its parameters, as a span of indices of `FlatLayout.params`.
    """

    span: Span
    members: Span


@dataclass(frozen=True)
class FlatLayout:
    """The positions of all parameters in one flat parameter, and the shards of ``world`` ranks.

    Attributes:
        params: the parameters in the order of their positions.
        spans: for each parameter its span of the flat space.
        world: number of shards (ranks of the shard group).
        numel: elements of the unpadded flat parameter. Alignment padding is part of it, and so is the world padding
            if the total was padded (``pack(pad_total=True)``): FSDP1's unpadded unsharded size.
        shard_numel: elements of every rank's shard, including padding.
        align: every span starts at a multiple of this number of elements.
        segments: the segments in order; by default one for all of the space. [Note: pieces]

    Creation takes O(parameters), independent of the world; `owned` takes O(log parameters + owned parameters).

    Example:
        >>> layout = FlatLayout.pack([ParamSpec("weight", (2, 3)), ParamSpec("bias", (3,))], world=2, align=4)
        >>> [str(span) for span in layout.spans], layout.numel, layout.shard_numel
        (['[0, 6)', '[8, 11)'], 11, 6)
        >>> [(layout.params[own.index].name, str(own.in_param), str(own.in_shard)) for own in layout.owned(1)]
        [('bias', '[0, 3)', '[2, 5)')]
    """

    params: tuple[ParamSpec, ...]
    spans: tuple[Span, ...]
    world: int
    numel: int
    shard_numel: int
    align: int = 1
    segments: tuple[Segment, ...] = ()

    @classmethod
    def pack(cls, params: Iterable[ParamSpec], *, world: int, align: int = 1, pad_total: bool = False) -> FlatLayout:
        """Place ``params`` in the given order, each at the next multiple of ``align`` elements, in equal shards.

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
        """Verify that the spans fit their parameters and that the shards contain every parameter exactly once."""
        if self.world < 1 or self.align < 1:
            raise InternalError(f"a layout needs world >= 1 and align >= 1, found {self.world} and {self.align}")
        if not self.segments:
            whole = Segment(Span(0, max(0, self.shard_numel) * self.world), Span(0, len(self.params)))
            object.__setattr__(self, "segments", (whole,))
        self._prove_segments()
        if not 0 <= self.numel <= self.padded_numel:
            raise InternalError(f"{self.world} shards of {self.shard_numel} elements do not hold {self.numel} elements")
        end = 0
        for param, span in zip(self.params, self.spans, strict=True):
            if span.numel != param.numel:
                raise InternalError(f"{param.name!r} of {param.numel} elements was given the span {span}")
            if span.start < end:
                raise InternalError(f"{param.name!r} at {span} overlaps the previous parameter, which ends at {end}")
            if span.start % self.align:
                raise InternalError(f"{param.name!r} at {span} does not start at a multiple of {self.align}")
            if span.stop > self.numel:
                raise InternalError(f"{param.name!r} at {span} ends beyond the {self.numel} elements of the layout")
            end = span.stop
        # The pieces of a segment are equal and adjacent, so they cover each span inside of it exactly once: there is no
        # need to check each rank.
        for segment in self.segments:
            for index in range(segment.members.start, segment.members.stop):
                param, span = self.params[index], self.spans[index]
                if span.start < segment.span.start or span.stop > segment.span.stop:
                    raise InternalError(f"{param.name!r} at {span} lies outside of its segment {segment.span}")
        names = [param.name for param in self.params]
        if len(set(names)) != len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise InternalError(f"each parameter must occur once, but these names occur more than once: {twice}")

    def _prove_segments(self) -> None:
        """Verify that segments are disjoint and split evenly, and that each parameter is in one."""
        end = members = pieces = 0
        for segment in self.segments:
            if segment.span.start < end:
                raise InternalError(f"the segment {segment.span} overlaps the previous one, which ends at {end}")
            if segment.span.numel % self.world:
                raise InternalError(f"{self.world} ranks cannot split the segment {segment.span} evenly")
            if segment.members.start != members:
                raise InternalError(f"parameters {segment.members} are in the segment after that of {members - 1}")
            end, members = segment.span.stop, segment.members.stop
            pieces += segment.span.numel // self.world
        if members != len(self.params):
            raise InternalError(f"the segments hold {members} of {len(self.params)} parameters")
        if pieces != self.shard_numel:
            raise InternalError(f"pieces of {pieces} elements do not make a shard of {self.shard_numel}")

    @property
    def padded_numel(self) -> int:
        """Elements of the unsharded buffer: of all shards, and of the padding between segments."""
        return self.segments[-1].span.stop

    def shard(self, rank: int) -> Span:
        """The span of ``rank``'s shard in the flat space, including padding. Precondition: there is one segment."""
        if len(self.segments) > 1:
            raise InternalError(f"a shard of {len(self.segments)} segments is not a single span of the flat space")
        return self.pieces(rank)[0]

    def pieces(self, rank: int) -> tuple[Span, ...]:
        """For each segment the span of ``rank``'s piece in the flat space, including padding."""
        cached: tuple[Span, ...] | None = self._known.get(("pieces", rank))
        if cached is None:
            if not 0 <= rank < self.world:
                raise ConfigValueError(f"expected a rank from 0 to {self.world - 1}, found {rank}")
            starts = [segment.span.start for segment in self.segments]
            cached = self._known["pieces", rank] = tuple(
                Span(0, stored.numel).shift(start + rank * stored.numel)
                for start, stored in zip(starts, self.pieces_in_shard, strict=True)
            )
        return cached

    def owned(self, rank: int) -> tuple[Owned, ...]:
        """The elements that ``rank`` owns of each parameter, in order, without parameters of which it owns none."""
        cached: tuple[Owned, ...] | None = self._known.get(("owned", rank))
        if cached is None:
            cached = self._known["owned", rank] = tuple(self._cut(rank))
        return cached

    def span_in_shard(self, index: int, rank: int) -> Span:
        """The span of parameter ``index`` in the shard of ``rank``; an empty span inside the shard if it has none."""
        segment = self._segment_of[index]
        piece, stored = self.pieces(rank)[segment], self.pieces_in_shard[segment]
        return piece.intersect(self.spans[index]).shift(stored.start - piece.start)

    def span_in_param(self, index: int, rank: int) -> Span:
        """The elements of parameter `index` that are in the shard of ``rank``; ``[0, 0)`` if there are none."""
        shared = self.spans[index].intersect(self.pieces(rank)[self._segment_of[index]])
        return Span(0, 0) if shared.is_empty else shared.shift(-self.spans[index].start)

    def is_uncut(self, index: int) -> bool:
        """Whether one rank has all of parameter ``index``, however many ranks there are, or there is one rank."""
        return self.world == 1

    def digest(self) -> str:
        """SHA-256 in hex over the complete layout: equal on two ranks exactly if their layouts are equal."""
        return hashlib.sha256("\n".join(self._facts()).encode()).hexdigest()

    def _facts(self) -> Iterator[str]:
        yield f"world {self.world} numel {self.numel} shard {self.shard_numel} align {self.align}"
        if len(self.segments) > 1:  # not for one segment: existing files contain digests of such layouts
            yield " ".join(f"{segment.span} of {segment.members}" for segment in self.segments)
        for param, span in zip(self.params, self.spans, strict=True):
            yield f"{param.name!r} {param.shape} {param.stride} {span}{'' if param.part is None else f' {param.part}'}"

    def _cut(self, rank: int) -> Iterator[Owned]:
        for segment, piece, stored in zip(self.segments, self.pieces(rank), self.pieces_in_shard, strict=True):
            end = segment.members.stop
            index = bisect_right(self._stops, piece.start, segment.members.start, end)
            while index < end and self.spans[index].start < piece.stop:
                span = self.spans[index]
                own = span.intersect(piece)
                if not own.is_empty:
                    yield Owned(index, own.shift(-span.start), own.shift(stored.start - piece.start))
                index += 1

    @cached_property
    def pieces_in_shard(self) -> tuple[Span, ...]:
        """For each segment the span of its piece in every rank's shard; these are adjacent."""
        sizes = [segment.span.numel // self.world for segment in self.segments]
        ends = list(accumulate(sizes))
        return tuple(Span(end - size, end) for size, end in zip(sizes, ends, strict=True))

    @cached_property
    def gaps(self) -> tuple[Span, ...]:
        """The spans of the flat space outside of all parameters: alignment padding and world padding, in order."""
        starts = (*(span.start for span in self.spans), self.padded_numel)
        ends = (0, *(span.stop for span in self.spans))
        return tuple(Span(end, start) for end, start in zip(ends, starts, strict=True) if start > end)

    @cached_property
    def _stops(self) -> tuple[int, ...]:
        return tuple(span.stop for span in self.spans)

    @cached_property
    def _segment_of(self) -> tuple[int, ...]:
        return tuple(number for number, each in enumerate(self.segments) for _ in range(each.members.numel))

    @cached_property
    def _known(self) -> dict[tuple[str, int], Any]:
        """The cached results of `pieces` and `owned`, by rank."""
        return {}


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
