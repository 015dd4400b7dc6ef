"""Layouts that are cut between grains, and prove it.

[Note: grains] A parameter's *grain* is a number of elements: the parameter may be cut only at its multiples, counted
from the parameter's start. (A multiple of a row keeps rows whole, all elements the parameter.) With grains, parameters
are in any order, with padding between them, and in several segments, as `plan` finds them: an ordinary layout, except
that it knows the grains. Names do not depend on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ...errors import InternalError
from ..layout.layout import FlatLayout, ParamSpec, Segment, Span


@dataclass(frozen=True)
class PlannedLayout(FlatLayout):
    """A layout whose pieces end between the grains of parameters.

    Attributes:
        grains: for each parameter its grain, in elements. [Note: grains]
        given_up: the names of parameters that are cut anywhere, though another grain was preferred.
    """

    grains: tuple[int, ...] = ()
    given_up: tuple[str, ...] = ()

    @classmethod
    def of_pieces(
        cls,
        segments: Iterable[tuple[int, Sequence[tuple[int, ParamSpec, int]]]],
        *,
        world: int,
        align: int = 1,
        given_up: tuple[str, ...] = (),
    ) -> PlannedLayout:
        """Place segments one after the other, each given as the elements of a rank's piece, and its parameters in
        order: (first element in the segment, parameter, grain). Segments start at multiples of ``align`` elements."""
        params: list[ParamSpec] = []
        spans: list[Span] = []
        grains: list[int] = []
        made: list[Segment] = []
        end = shard_numel = 0
        for piece, members in segments:
            start = -(-end // align) * align
            for first, param, grain in members:
                params.append(param)
                spans.append(Span(start + first, start + first + param.numel))
                grains.append(grain)
            end = start + piece * world
            shard_numel += piece
            made.append(Segment(Span(start, end), Span(len(params) - len(members), len(params))))
        return cls(tuple(params), tuple(spans), world, end, shard_numel, align, tuple(made), tuple(grains), given_up)

    def __post_init__(self) -> None:
        """Verify what every layout does, and that pieces end at multiples of the grains of parameters that they cut.

        Cuts of a parameter are at distances of a piece, so the first one and the distance determine all of them.
        """
        super().__post_init__()
        if len(self.grains) != len(self.params):
            raise InternalError(f"there are {len(self.grains)} grains of {len(self.params)} parameters")
        for segment in self.segments:
            start, piece = segment.span.start, segment.span.numel // self.world
            for index in range(segment.members.start, segment.members.stop):
                span, grain = self.spans[index], self.grains[index]
                name, numel = self.params[index].name, span.stop - span.start
                if grain < 1:
                    raise InternalError(f"{name!r} has a grain of {grain} elements")
                if grain == 1 or not numel:
                    continue
                first = piece - (span.start - start) % piece
                for cut in (first, first + piece):
                    if cut < numel and cut % grain:
                        raise InternalError(
                            f"{name!r} at {span} is cut {cut} elements after its start by pieces of {piece} elements: "
                            f"that is no multiple of its grain, {grain}"
                        )

    @property
    def padding(self) -> int:
        """The elements of all shards that are in no parameter."""
        return self.shard_numel * self.world - sum(span.numel for span in self.spans)

    def is_uncut(self, index: int) -> bool:
        """Whether one rank has all of parameter ``index``, since its grain is all of it, or there is one rank."""
        return self.world == 1 or self.grains[index] >= self.params[index].numel > 0

    def _facts(self) -> Iterator[str]:
        yield from super()._facts()
        yield f"grains {self.grains}"
