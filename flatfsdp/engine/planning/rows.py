"""A layout of complete rows: the meaning of FSDP2's ``Shard(0)``. [Note: pieces]"""

from __future__ import annotations

from collections.abc import Iterable

from ..layout.layout import FlatLayout, ParamSpec, Segment, Span


def pack_rows(params: Iterable[ParamSpec], *, world: int, align: int = 1) -> FlatLayout:
    """Place ``params`` in the given order, each in a segment of its own, of which every rank has complete rows.

    A rank's piece is ``ceil(rows / world)`` rows, full on the first ranks: the chunks of ``torch.chunk`` along the
    slowest dimension in memory (`ParamSpec.rows`). Segments start at multiples of ``align`` elements. In a world of
    one rank there is only one segment.

    Raises:
        ConfigValueError: ``world`` or ``align`` below 1.

    Example:
        >>> layout = pack_rows([ParamSpec("weight", (5, 2)), ParamSpec("bias", (3,))], world=2)
        >>> [str(segment.span) for segment in layout.segments], layout.shard_numel
        (['[0, 12)', '[12, 16)'], 8)
        >>> [(str(part.in_param), str(part.in_shard)) for part in layout.owned(1)]
        [('[6, 10)', '[0, 4)'), ('[2, 3)', '[6, 7)')]
    """
    params = tuple(params)
    if world <= 1 or align < 1 or not params:  # refused there, or one segment
        return FlatLayout.pack(params, world=world, align=align, pad_total=True)
    spans: list[Span] = []
    segments: list[Segment] = []
    end = 0
    for index, param in enumerate(params):
        start = -(-end // align) * align
        row = param.numel // param.rows if param.rows else 0
        end = start + -(-param.rows // world) * world * row
        spans.append(Span(start, start + param.numel))
        segments.append(Segment(Span(start, end), Span(index, index + 1)))
    shard_numel = sum(segment.span.numel for segment in segments) // world
    return FlatLayout(params, tuple(spans), world, end, shard_numel, align, tuple(segments))
