"""Private names of torch.distributed.tensor, as `_torch.py` has those of torch: apart, because importing that takes
seconds, which only models with DTensors pay."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from operator import attrgetter
from typing import Any

import torch

from . import _torch

REASONS = {
    "device_mesh.DeviceMesh._concatenate": "parameters that are split by data and by tensor parallelism lie on the "
    "mesh of both, and only this makes one of two that exist without new process groups",
    "device_mesh.DeviceMesh._flatten": "several data-parallel dimensions of a mesh are one axis of ranks, whose group "
    "the mesh has to know, so that others that flatten the same dimensions find it",
    "tensor.placement_types._StridedShard": "rows that tensor parallelism has split are split again by data "
    "parallelism, which is the other way round in the order of the mesh; only this placement shows it",
    "tensor._dtensor_spec.DTensorSpec": "what a DTensor is made of without communication; `from_local` calls autograd "
    "and makes a new one each time",
    "tensor._dtensor_spec.TensorMeta": "the shape, the strides and the dtype in it",
    "tensor.DTensor._local_tensor": "`to_local` makes another tensor each time, and what it returns shares no version",
    "tensor.DTensor._spec": "mesh, placements, shape and strides as one value that can be compared",
}


_LOCAL = attrgetter("_local_tensor")


def is_dtensor(value: object) -> bool:
    """Whether `value` is a DTensor; does not import their module, without which there is none."""
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
    """What this rank has of a DTensor, the tensor itself."""
    local: torch.Tensor = value._local_tensor
    return local


def local_bytes(value: torch.Tensor) -> int:
    """Bytes of what this rank has of `value`, which may be a DTensor."""
    local = local_of(value) if is_dtensor(value) else value
    return local.numel() * local.element_size()


def locals_of(values: Iterable[Any]) -> list[Any]:
    """What this rank has of each DTensor among `values`; of whatever is none, itself."""
    module: Any = sys.modules.get("torch.distributed.tensor")
    if module is None:
        return list(values)
    kind, every = module.DTensor, list(values)
    if set(map(type, every)) <= {kind}:
        return list(map(_LOCAL, every))
    return [value._local_tensor if isinstance(value, kind) else value for value in every]


def are_split_alike(one: Any, other: Any) -> bool:
    """Whether two DTensors are of one shape, and split over one mesh in the same way."""
    if not (is_dtensor(one) and is_dtensor(other)):
        return False
    split, as_this = one._spec, other._spec
    return (split.shape, split.mesh, split.placements) == (as_this.shape, as_this.mesh, as_this.placements)


def whole_of(value: Any) -> torch.Tensor:
    """The whole of a DTensor, where its parts are. Collective over its mesh.

    Gloo gathers parts from the host's memory only: `full_tensor` gives it an accelerator's as if it were that, and the
    process dies of it. So where gloo serves the mesh they go there first.
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
    """A DTensorSpec."""
    specs = _distributed().tensor._dtensor_spec
    meta = specs.TensorMeta(torch.Size(shape), tuple(stride), dtype)
    return specs.DTensorSpec(mesh, tuple(placements), tensor_meta=meta)


def strided_shard(dim: int, split_factor: int) -> Any:
    """The placement of rows that `split_factor` ranks of later dimensions of the mesh have split before."""
    return _distributed().tensor.placement_types._StridedShard(dim, split_factor=split_factor)


def split_factor_of(placement: Any) -> int | None:
    """By how many ranks of later dimensions of the mesh rows were split before; None for any other placement."""
    if type(placement).__name__ != "_StridedShard":
        return None
    factor: int = placement.split_factor
    return factor


def concatenated(meshes: Sequence[Any]) -> Any:
    """The mesh of all dimensions of `meshes`, which are of one mesh."""
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh._concatenate(list(meshes))


def flattened(mesh: Any, name: str) -> Any:
    """The mesh of one dimension over all ranks of `mesh`. Collective where its group is made, once for each name."""
    return mesh._flatten(name)


def dtensor(local: torch.Tensor, spec: Any) -> Any:
    """A DTensor around `local`, which it holds itself; autograd knows nothing of it."""
    return dtensors([local], [spec])[0]


def dtensors(locals_: Sequence[torch.Tensor], specs: Iterable[Any]) -> list[Any]:
    """A DTensor around each of `locals_`, of one dtype and on one device.

    Without `__init__`, which is for `torch.export`. Made around a tensor that begins its storage: with an
    offset of its own a DTensor seems to have memory, and `copy.deepcopy` looks for that.
    """
    if not locals_:
        return []
    nothing, kind = nothing_like(locals_[0]), dtensor_type()
    made = []
    for local, spec in zip(locals_, specs, strict=True):
        one = kind.__new__(kind, nothing, spec, requires_grad=False)
        one._local_tensor = local
        made.append(one)
    return made


# A storage takes longer to make than a DTensor does, of which each gradient takes a new one: they share those without
# elements.
_nothing: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}


def nothing_like(local: torch.Tensor) -> torch.Tensor:
    """No elements, of the dtype of `local` and where that is; always the same."""
    known = _nothing.get((local.dtype, local.device)) if type(local) is torch.Tensor else None
    if known is not None:
        return known
    with torch.inference_mode(False):
        if type(local) is torch.Tensor or isinstance(local, _torch.fake_tensors().FakeTensor):
            made = local.new_empty(0)
        else:  # what gather hooks made, whose class may know few operations: torchao's float8 refuses this one
            made = torch.empty(0, dtype=local.dtype, device=local.device)
    if type(made) is torch.Tensor:  # not of a dry run
        _nothing[made.dtype, made.device] = made
    return made


@cache
def dtensor_type() -> Any:
    """The class of DTensors."""
    from torch.distributed.tensor import DTensor

    return DTensor


# What torch.compile has called for each frame of the caller's, in case that is part of something compiled.
_compiler: Callable[[], Any] = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", lambda: None)


def is_compiled_around() -> bool:
    """Whether the caller runs within what torch.compile compiles; it is left out of that."""
    if torch.compiler.is_compiling():
        _torch.stay_out_of_graphs()
    return callable(_compiler())


def as_of_torch(value: Any) -> Any:
    """A DTensor like `value` with the offset of its local tensor, as torch.compile makes it of that again."""
    return dtensor_type().__new__(dtensor_type(), value._local_tensor, value._spec, requires_grad=False)


def set_local(value: Any, local: torch.Tensor, spec: Any) -> None:
    """Let a DTensor have `local`, of its dtype, as what this rank has of it, and `spec`."""
    value._local_tensor, value._spec = local, spec
