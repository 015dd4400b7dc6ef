"""A state dict that only the first rank has, as a state dict on every rank.

Every rank gets the keys. Its values know their shape, and arrive where they are copied to: into a buffer at once, into
the shards of a unit all together (`consolidate.scatter`). Non-tensors are sent along with the keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ....errors import UsageError
from ...agreement.object_collectives import firsts
from ...base.plain_data import decode, encode
from ...comm.transport import Transport
from ...runtime.unit import Unit
from ..consolidate import is_first
from .lazy_values import LazyValue


class FromRank0(LazyValue):
    """A value of the first rank's state dict.

    Attributes:
        value: the value there, None on other ranks.
        unit: over whose axes it is sent.
    """

    value: torch.Tensor | None
    unit: Unit
    why = "only rank 0 has"

    def fetch_into(self, target: torch.Tensor) -> None:
        traveling = (
            (target if self.value is None else self.value).to(self.unit.groups.device, target.dtype).contiguous()
        )
        for axis in axes_of(self.unit):
            axis.broadcast(traveling)
        target.copy_(traveling)


def spread(unit: Unit, state_dict: dict[str, Any], prefix: str) -> None:
    """Replace `state_dict` below `prefix` by what the first rank has there. Collective over both axes of `unit`.

    Does nothing inside a wrapper for which it has been done.

    Raises:
        UsageError: on every rank: a value cannot be sent.
    """
    keys = [key for key in state_dict if key.startswith(prefix)]
    if any(isinstance(state_dict[key], FromRank0) for key in keys):
        return
    first = is_first(unit)
    reported: list[tuple[str, Any, Any]] = []
    for key in keys if first else ():
        value = state_dict[key]
        is_tensor = isinstance(value, torch.Tensor)
        reported.append((key, tuple(value.shape), value.dtype) if is_tensor else (key, None, value))
    content = encode(_refusal(reported, state_dict) or reported, objects=True)
    known = decode(firsts([*axes_of(unit)], content), objects=True)
    if isinstance(known, str):
        raise UsageError(f"load_state_dict() from rank 0: {known}")
    held = {key: state_dict.pop(key) for key in keys}
    for key, shape, what in known:
        if shape is None:
            state_dict[key] = what
        else:
            state_dict[key] = FromRank0.of(held[key] if first else None, shape, what)
            state_dict[key].unit = unit


def _refusal(reported: list[tuple[str, Any, Any]], state_dict: dict[str, Any]) -> str | None:
    """Why the first rank's values cannot be sent, in words; None if they can."""
    for key, shape, what in reported:
        value = state_dict[key]
        if shape is not None and (value.is_meta or value.layout != torch.strided):
            return f"{key!r} is a {value.layout} tensor on {value.device}, expected a dense one with values"
        if shape is None:
            try:
                encode(what, objects=True)
            except UsageError as error:
                return f"{key!r}: {error}"
    return None


def axes_of(unit: Unit) -> Iterator[Transport]:
    """Along which what the first rank has reaches all others: first the counterparts in other replicas."""
    for axis in (unit.replicate, unit.gather):
        if axis is not None:
            yield axis
