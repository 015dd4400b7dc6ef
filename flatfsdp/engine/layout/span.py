"""An interval of elements."""

from __future__ import annotations

import builtins
from dataclasses import dataclass

from ...errors import InternalError


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
