"""Residuals of gradients under error feedback."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.harness import inspect
from tests.harness.gradients import plain


def owed_by_all(model: Any) -> dict[str, Tensor]:
    """The sum of all ranks' residuals by parameter, in the units of the mean gradient. Collective."""
    found: dict[str, Tensor] = {}
    flats = [(unit.name, flat) for unit in inspect.units(model) for flat in unit.flat_params]
    for (unit, flat), total in zip(flats, inspect.owed(model), strict=True):
        torch.distributed.all_reduce(total)
        for spec, span in zip(flat.layout.params, flat.layout.spans, strict=True):
            name = f"{unit}.{spec.name}" if unit else spec.name
            found[plain(name)] = total[span.slice].view(spec.shape) / torch.distributed.get_world_size()
    return found
