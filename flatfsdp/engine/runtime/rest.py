"""What may be done between iterations only."""

from __future__ import annotations

from ...errors import UsageError
from ..base import _torch
from .unit import Unit


def check_outside(unit: Unit, method: str) -> None:
    """Refuse a change while a forward or a backward runs: what its ranks have agreed on would no longer hold."""
    if _torch.in_backward() or unit.root.in_forward:
        raise UsageError(
            f"{method} of unit {unit.label} was called inside a "
            f"{'backward' if _torch.in_backward() else 'forward'}; call it before the forward, or between forward and "
            "backward"
        )
