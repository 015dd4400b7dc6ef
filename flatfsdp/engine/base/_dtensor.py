"""Private names of torch.distributed.tensor, as `_torch.py` has those of torch. They are separate because importing
that module takes seconds, which only models with DTensors should pay."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import repeat
from operator import attrgetter
from typing import Any

import torch

from . import _torch

REASONS = {
    "device_mesh.DeviceMesh._concatenate": "parameters that are split by data and by tensor parallelism have the "
    "mesh of both, and only this combines two existing meshes without new process groups",
    "device_mesh.DeviceMesh._flatten": "several data-parallel dimensions of a mesh are one axis of ranks, whose group "
    "must be registered in the mesh, so that other code that flattens the same dimensions finds it",
    "tensor.placement_types._StridedShard": "rows that tensor parallelism has split are split again by data "
    "parallelism, in the reverse order of the mesh's dimensions; only this placement describes that",
    "tensor._dtensor_spec.DTensorSpec": "DTensors are constructed from it without communication; `from_local` calls "
    "autograd and makes a new one each time",
    "tensor._dtensor_spec.TensorMeta": "the shape, the strides and the dtype in a DTensorSpec",
    "tensor.DTensor._local_tensor": "`to_local` returns a new tensor each time, which does not share the version",
    "tensor.DTensor._spec": "mesh, placements, shape and strides as one value that can be compared",
}


_LOCAL = attrgetter("_local_tensor")


def is_dtensor(value: object) -> bool:
    """Whether `value` is a DTensor. Does not import torch.distributed.tensor: without it there are no DTensors."""
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def missing() -> list[str]:
    """The names above that this torch does not have; imports torch.distributed.tensor."""
    absent = []
    for name in REASONS:
        found: Any = _distributed()
        for each in name.split("."):
            found = getattr(found, each, None)
        if found is None:
            absent.append(f"torch.distributed.{name}")
    return absent


def _distributed() -> Any:
    import torch.distributed.tensor
    import torch.distributed.tensor._dtensor_spec
    import torch.distributed.tensor.placement_types

    return torch.distributed


def local_of(value: Any) -> torch.Tensor:
    """The local tensor of a DTensor, not a copy or view."""
    local: torch.Tensor = value._local_tensor
    return local


def local_bytes(value: torch.Tensor) -> int:
    """Bytes of `value`, or of its local tensor if it is a DTensor."""
    local = local_of(value) if is_dtensor(value) else value
    return local.numel() * local.element_size()


def locals_of(values: Iterable[Any]) -> list[Any]:
    """`values`, with each DTensor replaced by its local tensor."""
    module: Any = sys.modules.get("torch.distributed.tensor")
    if module is None:
        return list(values)
    dtensor, every = module.DTensor, list(values)
    found = set(map(issubclass, set(map(type, every)), repeat(dtensor)))
    if found == {True}:
        return list(map(_LOCAL, every))
    return [value._local_tensor if isinstance(value, dtensor) else value for value in every] if True in found else every


def are_split_alike(one: Any, other: Any) -> bool:
    """Whether both are DTensors, with the same shape, mesh and placements."""
    if not (is_dtensor(one) and is_dtensor(other)):
        return False
    split, as_this = one._spec, other._spec
    return (split.shape, split.mesh, split.placements) == (as_this.shape, as_this.mesh, as_this.placements)


def whole_of(value: Any) -> torch.Tensor:
    """The full tensor of a DTensor, on the device of its local tensor. Collective over its mesh.

    Gloo can gather only from the host's memory: with parts on an accelerator, `full_tensor` would crash the process. So
    if gloo serves the mesh, the parts are copied to the host first.
    """
    device = value._local_tensor.device
    whole: torch.Tensor = (value.cpu() if _is_gathered_by_host(value, device) else value).full_tensor()
    return whole.to(device)


def _is_gathered_by_host(value: Any, device: torch.device) -> bool:
    groups = value.device_mesh.get_all_groups() if device.type != "cpu" else ()
    return bool(groups) and all(torch.distributed.get_backend(group) == "gloo" for group in groups)


def spec_of(value: Any) -> Any:
    """The DTensorSpec of a DTensor."""
    return value._spec


def new_spec(
    mesh: Any, placements: Sequence[Any], shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype
) -> Any:
    """A DTensorSpec with these properties."""
    specs = _distributed().tensor._dtensor_spec
    meta = specs.TensorMeta(torch.Size(shape), tuple(stride), dtype)
    return specs.DTensorSpec(mesh, tuple(placements), tensor_meta=meta)


def strided_shard(dim: int, split_factor: int) -> Any:
    """The placement of rows that were split before by `split_factor` ranks of later dimensions of the mesh."""
    return _distributed().tensor.placement_types._StridedShard(dim, split_factor=split_factor)


def split_factor_of(placement: Any) -> int | None:
    """The number of ranks of later mesh dimensions that split the rows before; None for any other placement."""
    if type(placement).__name__ != "_StridedShard":
        return None
    factor: int = placement.split_factor
    return factor


def concatenated(meshes: Sequence[Any]) -> Any:
    """The mesh of all dimensions of `meshes`, which are submeshes of one mesh."""
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh._concatenate(list(meshes))


def flattened(mesh: Any, name: str) -> Any:
    """The 1-D mesh over all ranks of `mesh`. Collective when its group is created, once per name."""
    return mesh._flatten(name)


def dtensor(local: torch.Tensor, spec: Any) -> Any:
    """A DTensor with `local` as its local tensor, without a graph."""
    return dtensors([local], [spec])[0]


def dtensors(locals_: Sequence[torch.Tensor], specs: Iterable[Any]) -> list[Any]:
    """A DTensor around each of `locals_`, which have one dtype and one device.

    `__init__`, which is for `torch.export`, is skipped. The wrapper is created from a tensor with storage offset 0: a
    DTensor with another offset appears to have memory of its own, which `copy.deepcopy` would access.
    """
    if not locals_:
        return []
    nothing, dtensor = nothing_like(locals_[0]), dtensor_type()
    made = []
    for local, spec in zip(locals_, specs, strict=True):
        one = dtensor.__new__(dtensor, nothing, spec, requires_grad=False)
        one._local_tensor = local
        made.append(one)
    return made


# Creating a storage takes longer than creating a DTensor, of which each gradient needs a new one: DTensors share an
# empty storage per dtype and device.
_nothing: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}


def nothing_like(local: torch.Tensor) -> torch.Tensor:
    """An empty tensor with the dtype and device of `local`; the same object in each call."""
    known = _nothing.get((local.dtype, local.device)) if type(local) is torch.Tensor else None
    if known is not None:
        return known
    with torch.inference_mode(False):
        if type(local) is torch.Tensor or isinstance(local, _torch.fake_tensors().FakeTensor):
            made = local.new_empty(0)
        else:  # a result of gather hooks, whose class may support few operations: torchao's float8 refuses `new_empty`
            made = torch.empty(0, dtype=local.dtype, device=local.device)
    if type(made) is torch.Tensor:  # not in a dry run
        _nothing[made.dtype, made.device] = made
    return made


@cache
def dtensor_type() -> Any:
    """The class of DTensors."""
    from torch.distributed.tensor import DTensor

    return DTensor


def dtensor_of_rows(rows: torch.Tensor, whole: torch.Tensor, process_group: Any, given: Any) -> Any:
    """A `DTensor` with the shape of `whole` and the local tensor `rows`; replicated if `whole` has no dimensions.

    It is sharded over the last dimension of the mesh `given`, or over a mesh of `process_group`.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = DeviceMesh.from_group(process_group, whole.device.type) if given is None else given
    placement = Shard(0) if whole.dim() else Replicate()
    placements = [*[Replicate()] * (mesh.ndim - 1), placement]
    stride = whole.contiguous().stride()
    return DTensor.from_local(rows, mesh, placements, run_check=False, shape=whole.shape, stride=stride)


def as_of_torch(value: Any) -> Any:
    """A DTensor like `value` with the storage offset of its local tensor, as torch.compile reconstructs it."""
    return dtensor_type().__new__(dtensor_type(), value._local_tensor, value._spec, requires_grad=False)


def split_alike(whole: torch.Tensor, spec: Any) -> Any:
    """A DTensor of `whole`, the same value on every rank, with the mesh and placements of `spec`. No communication."""
    return _distributed().tensor.distribute_tensor(whole, spec.mesh, spec.placements, src_data_rank=None)


def set_local(value: Any, local: torch.Tensor, spec: Any) -> None:
    """Set the local tensor of a DTensor to `local`, which has the same dtype, and its spec to `spec`."""
    value._local_tensor, value._spec = local, spec
