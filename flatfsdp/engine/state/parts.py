"""Parts of parameters that tensor parallelism has split, to wholes and back ([Note: parts of wholes]).

Values of the first rank travel in two steps: along the axes of parts to the ranks that are first on their unit's own
axes, and from these along those axes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..agreement.object_collectives import is_first_of
from ..base.wait_limits import blocked
from ..comm.axes import ProcessGroups
from ..comm.transport import Transport
from ..layout.layout import ParamSpec
from ..models.rest import models_of
from ..models.spread import all_part_axes, axes_of, beside, each_once
from ..parts.part import blocks_of, stored_shape
from ..runtime.unit import Unit
from ..transforms.extensions import TransformedParam, transformed_in
from ..transports.blocking import broadcast
from .owned_interval import block_of


def axes_of_parts(units: Sequence[Unit]) -> list[Transport]:
    """The axes of parts of all parameters in the models of `units`, each once."""
    return all_part_axes([unit for model in models_of(units) for unit in model.units])


def every_axis(units: Sequence[Unit]) -> list[Transport]:
    """The axes over which `units` are spread, and those of parts in their models, each once."""
    return each_once((*axes_of(units), *axes_of_parts(units)))


def axes_beside(unit: Unit, groups: ProcessGroups) -> list[Transport]:
    """The axes of parts in the model of `unit` along which no other rank is on the axes of `groups`."""
    return beside(groups, axes_of_parts([unit]))


def transformed_of(unit: Unit, kind: int, index: int) -> TransformedParam | None:
    """The transformed parameter of leaf `index` of the handle; None for one that is stored unchanged."""
    leaf = unit.handles[kind].leaves[index]
    return next((each for each in transformed_in(unit.views[kind]) if each.leaf is leaf), None)


def assembled(unit: Unit, kind: int, index: int, stored: torch.Tensor) -> torch.Tensor:
    """The whole of the part `stored` here of parameter `index`; `stored` itself if it is not a part. Collective over
    the axes of its parts."""
    if unit.handles[kind].layout.params[index].part is None:
        return stored
    found = transformed_of(unit, kind, index)
    assert found is not None
    with blocked():
        return found.transform.assemble(stored, found.state)


def cut(whole: torch.Tensor, spec: ParamSpec) -> torch.Tensor:
    """The part of `whole` that is stored here, in memory of its own; `whole` itself if the parameter is not a part."""
    if (part := spec.part) is None:
        return whole
    out = whole.new_empty(stored_shape(part))
    for offsets, sizes, inside in blocks_of(part, (0,) * len(part.shape), stored_shape(part)):
        block_of(out, inside, sizes).copy_(block_of(whole, offsets, sizes))
    return out


def sent_by_first(
    axes: Sequence[Transport], whole: torch.Tensor | None, shape: Sequence[int], dtype: torch.dtype
) -> torch.Tensor | None:
    """The first rank's `whole` tensor, of this shape, or None, on the other ranks of `axes`. Collective over them."""
    device = axes[0].device.device
    here = broadcast_tensor(axes, torch.tensor([whole is not None]), (1,), torch.bool, device)
    return broadcast_tensor(axes, whole, shape, dtype, device) if bool(here) else None


def broadcast_tensor(
    axes: Sequence[Transport], value: Any, shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """The first rank's `value`, of `shape` and `dtype` on `device`; other ranks' are ignored. Collective over
    `axes`."""
    if is_first_of(axes):
        tensor: torch.Tensor = value.detach().to(device, dtype).contiguous()
    else:
        tensor = torch.empty(tuple(shape), dtype=dtype, device=device)
    for axis in axes:
        broadcast(axis, tensor)
    return tensor
