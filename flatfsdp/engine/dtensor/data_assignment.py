"""`parameter.data = value` and `parameter.grad.data = value` where these are DTensors.

[Note: assigned data] torch's setter changes a DTensor's outer tensor and leaves its local tensor as it was, so that the
statement does nothing. Programs that put weights back (moving averages, sharpness-aware steps, learning-rate finders)
use it. From the first sharded parameter on, the setter of DTensors also sets the local tensor of parameters that are
sharded here, and of other DTensors on their meshes, such as gradients. A parameter's value goes to the shard where it
is next used, as that of any other replaced tensor. DTensors of other engines keep torch's setter.
"""

from __future__ import annotations

import weakref
from typing import Any, NoReturn, Protocol

import torch
from torch import nn

from ...errors import UsageError
from ..base import _dtensor
from .gather_hooks import has_gather_hooks

_TORCHS: Any = torch.Tensor.data


class Named(Protocol):
    """The owner of a DTensorSpec: a parameter's rows.

    Attributes:
        name: of the parameter, for messages.
    """

    name: str


# The owners of specs by the ids of these, which they keep; and the meshes of all of them.
_owners: weakref.WeakValueDictionary[int, Named] = weakref.WeakValueDictionary()
_meshes: set[Any] = set()


def follow(spec: Any, owner: Named) -> None:
    """Let assignments to the `.data` of DTensors with this spec take effect, for as long as `owner` lives, which keeps
    the spec."""
    dtensor_class = _dtensor.dtensor_type()
    if "data" not in vars(dtensor_class):
        dtensor_class.data = property(_TORCHS.__get__, _assign, _TORCHS.__delete__)
    _owners[id(spec)] = owner
    _meshes.add(spec.mesh)


def _assign(this: Any, value: Any) -> None:
    spec = _dtensor.spec_of(this)
    owner = _owners.get(id(spec))
    if owner is None and (isinstance(this, nn.Parameter) or spec.mesh not in _meshes):
        _TORCHS.__set__(this, value)
        return
    what = "the .data of a DTensor" if owner is None else f"the .data of {owner.name!r}, or of its gradient,"
    held = _dtensor.local_of(this)
    local = _local_of(value, spec, held, what)
    if (local.dtype, local.device) != (held.dtype, held.device):
        remedy = "; call to_empty(device=...) of the model first to allocate memory" if held.is_meta else ""
        raise UsageError(
            f"{what} was replaced by a tensor of {local.dtype} on {local.device}; expected {held.dtype} on "
            f"{held.device}. Convert the value, or convert the whole model with its .to(){remedy}"
        )
    apart = has_gather_hooks(held) or local.data_ptr() != held.data_ptr() or local.stride() != held.stride()
    if apart or not local.numel():
        _dtensor.set_local(this, local, spec)


def _local_of(value: Any, spec: Any, held: torch.Tensor, what: str) -> torch.Tensor:
    """This rank's local tensor of `value`, without communication."""
    if not isinstance(value, torch.Tensor):
        raise UsageError(f"{what} was replaced by a {type(value).__name__}; expected a tensor")
    value = value.detach()
    if _dtensor.is_dtensor(value):
        other = _dtensor.spec_of(value)
        local = _dtensor.local_of(value)
        if value.shape != spec.shape or other.mesh != spec.mesh:
            _refuse(value, spec, held, what)
        if other.placements == spec.placements:
            return local if local.shape == held.shape else _refuse(value, spec, held, what)
        if not all(each.is_replicate() for each in other.placements):
            _refuse(value, spec, held, what)
        value = local
    if value.shape == spec.shape:
        value = _dtensor.local_of(_dtensor.split_alike(value, spec))
    return value if value.shape == held.shape else _refuse(value, spec, held, what)


def _refuse(value: torch.Tensor, spec: Any, held: torch.Tensor, what: str) -> NoReturn:
    found = f"a tensor of shape {tuple(value.shape)}"
    if _dtensor.is_dtensor(value):
        other = _dtensor.spec_of(value)
        found = f"a DTensor of shape {tuple(value.shape)} with placements {other.placements} on {other.mesh}"
    raise UsageError(
        f"{what} was replaced by {found}; expected the full value of shape {tuple(spec.shape)}, from which each rank "
        f"takes its part, this rank's part of shape {tuple(held.shape)}, or a DTensor with placements "
        f"{spec.placements} on {spec.mesh}"
    )
