"""Values of state dicts that take communication: full tensors, values that arrive only when they are copied to their
target, and values in torch's classes for distributed tensors, which other programs wrote, or need.

The latter split a tensor by rows, not at the boundaries of our shards: both ways take communication. If an
`OwnedInterval` suffices, this module is not needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ....errors import InternalError, UsageError
from ...base import _dtensor, _torch
from ...base.wait_limits import blocked
from ...comm.axes import Axis
from ...device.streams import accelerator
from ...guards.param_guard import is_query, name_of
from ...runtime.unit import Unit
from ..owned_interval import block_of
from ..parts import assembled, transformed_of
from .placeholders import Placeholder
from .types import StateDictRequest


class LazyValue(torch.Tensor):
    """A value that arrives by communication. `copy_` of it into a placeholder is recorded there; into another tensor
    it is executed at once, in the order in which modules load, which is the same on all ranks.

    Attributes:
        value: the data for it.
        why: completes "a value that ...".
    """

    value: Any
    why = "requires communication"

    @classmethod
    def of(cls, value: Any, shape: Sequence[int], dtype: torch.dtype) -> Any:
        """A value with this data, shape and dtype, without memory."""
        self = torch.empty((), dtype=dtype).expand(tuple(shape)).as_subclass(cls)
        self.value = value
        return self

    def fetch_into(self, target: torch.Tensor) -> None:
        """Fill `target`. Collective."""
        raise InternalError(f"{type(self).__name__} has no fetch_into of its own")

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Metadata can be read; for `copy_` see the class; all other operations are refused."""
        if is_query(func):
            with _torch.as_plain_tensors():
                return func(*args, **(kwargs or {}))
        name = name_of(func)
        if name == ".data":  # modules that load parameters read it
            return args[0]
        if name == "copy_()" and isinstance(args[1], LazyValue):
            target, source = args[0], args[1]
            if isinstance(target, Placeholder):
                target.received = source
            else:
                with torch.no_grad(), _torch.as_plain_tensors():
                    source.fetch_into(target)
            return target
        raise UsageError(
            f"{name} of a value that {cls.why}, while its state dict is loaded: a hook or a _load_from_state_dict of "
            "a module computes with it. Give every rank a FULL_STATE_DICT, without rank0_only"
        )


class DistributedValue(LazyValue):
    """A DTensor or a ShardedTensor as a value to be loaded, in the attribute `value`."""

    def fetch_into(self, target: torch.Tensor) -> None:
        target.copy_(whole_if_distributed(self.value))


def is_distributed(value: Any) -> bool:
    """Whether `value` is a DTensor or a ShardedTensor."""
    sharded = type(value).__name__ == "ShardedTensor" and type(value).__module__.startswith("torch.")
    return sharded or _dtensor.is_dtensor(value)


def described(value: Any) -> tuple[torch.Size, torch.dtype]:
    """Shape and dtype of the whole of a DTensor or a ShardedTensor."""
    if type(value).__name__ != "ShardedTensor":
        return value.shape, value.dtype
    known = value.metadata()  # other attributes of a ShardedTensor warn when they are read
    return known.size, known.tensor_properties.dtype


def whole_if_distributed(value: Any) -> Any:
    """The full tensor of a DTensor or a ShardedTensor, collective over its mesh or process group; others unchanged."""
    if not is_distributed(value):
        return value
    return _dtensor.whole_of(value) if _dtensor.is_dtensor(value) else _whole_of_shards(value)


def defer_distributed(state_dict: dict[str, Any]) -> None:
    """Replace torch's distributed tensors in `state_dict` by `DistributedValue`."""
    for key, value in state_dict.items():
        if is_distributed(value):
            state_dict[key] = DistributedValue.of(value, *described(value))


def _whole_of_shards(value: Any) -> torch.Tensor:
    shards, metadata = value.local_shards(), value.metadata()
    group = _torch.group_of_sharded_tensor(value)
    device = accelerator() if "nccl" in str(dist.get_backend(group)) else torch.device("cpu")
    unsharded = torch.zeros(metadata.size, dtype=metadata.tensor_properties.dtype, device=device)
    for shard in shards:
        sizes = shard.metadata.shard_sizes
        block_of(unsharded, shard.metadata.shard_offsets, sizes).copy_(shard.tensor.view(sizes))
    # Each byte comes from one rank, and all others add zeros to it: as bytes, because -0.0 + 0.0 is 0.0.
    with blocked():
        dist.all_reduce(unsharded.view(-1).view(torch.uint8), group=group)
    return unsharded


def _require_ranks(axis: Axis) -> None:
    if axis.process_group is None:
        raise UsageError(
            "state dicts of DTensors or ShardedTensors need a shard axis of several ranks, but here every rank holds "
            'whole parameters (NO_SHARD, or one rank). Use sharded_as="interval" in the config, or FULL_STATE_DICT'
        )


def flat_of(local: torch.Tensor, start: int, numel: int, axis: Axis) -> Any:
    """A ShardedTensor of `numel` elements; this rank has `local`, from `start` on. Collective over the axis."""
    _require_ranks(axis)
    return _torch.sharded_tensor_of_rows(local, start, (numel,), axis.process_group)


def carrier_of(unit: Unit, sharded_as: str) -> str:
    """The form for values of `unit`: "interval", "sharded_tensor" or "dtensor", or "whole"."""
    if sharded_as != "fsdp1":
        return sharded_as
    if unit.groups.shard.size == 1:
        return "whole"
    return "sharded_tensor" if unit.built.device_mesh is None else "dtensor"


def carried(
    view: torch.Tensor, unit: Unit, kind: int, index: int, request: StateDictRequest, *, keeps: bool
) -> torch.Tensor | None:
    """The value in a state dict for `view`, the unsharded form of parameter `index` as stored here, or of a state of
    it: the full tensor, for ranks that keep it, or rows; in memory of its own. Collective for parts, and for rows."""
    carrier, offload = carrier_of(unit, request.carrier), request.offload_to_cpu
    if carrier == "dtensor" and unit.handles[kind].layout.params[index].part is not None:
        return _rows_of_part(view, unit, kind, index, offload_to_cpu=offload)
    whole = assembled(unit, kind, index, view)
    if carrier != "whole":
        return _rows_of(whole, unit, as_dtensor=carrier == "dtensor", offload_to_cpu=offload)
    if not keeps:
        return None
    return whole if whole is not view and not offload else request.copy(whole)


def _own_rows(unsharded: torch.Tensor, axis: Axis) -> torch.Tensor:
    """This rank's rows, in memory of their own. They are split over `axis` as by `torch.chunk`; the last ranks may have
    none."""
    pieces = unsharded.chunk(axis.size, 0)
    return (pieces[axis.rank] if axis.rank < len(pieces) else unsharded[:0]).clone()


def _rows_of_part(stored: torch.Tensor, unit: Unit, kind: int, index: int, *, offload_to_cpu: bool) -> Any:
    """This rank's rows of the part of a parameter that is `stored` here, as a DTensor of the whole. No
    communication."""
    found = transformed_of(unit, kind, index)
    assert found is not None
    if unit.built.device_mesh is None:
        raise UsageError(
            "a state dict of DTensors, of parameters that are DTensors themselves, needs the mesh of the wrapper: give "
            'it device_mesh=mesh["dp"] instead of a process group, or use sharded_as="interval" in the config'
        )
    made: Any = found.transform.sharded(_own_rows(stored, unit.groups.shard), unit.built.device_mesh, found.state)
    return made.cpu() if offload_to_cpu else made  # its mesh keeps its device


def _rows_of(unsharded: torch.Tensor, unit: Unit, *, as_dtensor: bool, offload_to_cpu: bool) -> Any:
    """This rank's rows of `unsharded` as a DTensor or a ShardedTensor.

    Tensors without rows stay tensors (DTensor: replicated if there are no dimensions). A DTensor lies on the unit's
    mesh, on (Replicate, Shard(0)) of that of a hybrid. Collective over the shard axis.
    """
    axis = unit.groups.shard
    _require_ranks(axis)
    own = _own_rows(unsharded, axis) if unsharded.dim() else unsharded.clone()
    if as_dtensor:
        made = _dtensor.dtensor_of_rows(own, unsharded, axis.process_group, unit.built.device_mesh)
        return made.cpu() if offload_to_cpu else made  # its mesh keeps its device
    own = own.cpu() if offload_to_cpu else own
    if not unsharded.dim() or not unsharded.shape[0]:
        return own  # torch makes no ShardedTensor without rows
    first = min(axis.rank * -(-unsharded.shape[0] // axis.size), unsharded.shape[0])
    return _torch.sharded_tensor_of_rows(own, first, unsharded.shape, axis.process_group)
