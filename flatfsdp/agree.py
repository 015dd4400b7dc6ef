"""What ranks must have in common, compared before it matters."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .root import Root
    from .unit import Unit


class Agreement:
    def __init__(self, *, check_values: str) -> None:
        self.check_values = check_values

    def compare(self, root: Root) -> None: ...

    def compare_values(self, root: Root) -> None: ...

    def check_order(self, root: Root, unit: Unit) -> None: ...
