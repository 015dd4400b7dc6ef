"""Tensors with FSDP2's extensions of the all-gather: cast to bfloat16, or rounded to int8 with a scale for each row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import torch.utils._pytree as pytree
from torch import nn

_aten = torch.ops.aten
PRESERVING = {  # FSDP2 calls these
    _aten.empty_like.default,
    _aten.new_zeros.default,
    _aten.slice.Tensor,
    _aten.copy_.default,
    _aten.view.default,
    _aten.as_strided.default,
    _aten._to_copy.default,
    _aten._pin_memory.default,
    _aten.split.Tensor,
    _aten.clone.default,
    _aten.detach.default,
}


class Around(torch.Tensor):
    """A tensor around another one, which it does not name. Calls of hooks are counted."""

    calls: ClassVar[list[str]] = []
    _data: torch.Tensor

    @staticmethod
    def __new__(cls, data: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls, data.shape, strides=data.stride(), dtype=data.dtype, device=data.device
        )

    def __init__(self, data: torch.Tensor) -> None:
        self._data = data

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"{type(self).__name__}({self._data})"

    @classmethod
    def __torch_dispatch__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = pytree.tree_map_only(Around, lambda each: each._data, (args, kwargs or {}))
        made = func(*args, **kwargs)
        return pytree.tree_map_only(torch.Tensor, cls, made) if func in PRESERVING else made

    def _padded(self, mesh: Any, outer_size: torch.Size) -> torch.Tensor:
        rows = -(-outer_size[0] // mesh.size())
        return torch.cat([self._data, self._data.new_zeros(rows - self.shape[0], *self.shape[1:])])


class Gathered(Around):
    """A tensor around another one, with hooks that change the gathered form."""

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["_data"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], context: Any, size: Any, stride: Any) -> Any:
        return cls(inner["_data"])


class Halving(Around):
    """Half the bytes of float32; modules compute in `param_dtype`, in memory that is freed with the parameter."""

    def fsdp_pre_all_gather(self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> Any:
        assert mesh.ndim == 1 and isinstance(module, nn.Module) and hasattr(mp_policy, "param_dtype")
        self.calls.append("pre")
        return (self._padded(mesh, outer_size).to(torch.bfloat16),), tuple(outer_stride)

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None) -> Any:
        self.calls.append("post" if out is None else "refill")
        (tensor,) = outputs
        if out is None:
            made = tensor.to(param_dtype)
            return made, (tensor, made)
        out = getattr(out, "_local_tensor", out)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
            out.copy_(tensor[: out.shape[0]])
        return None


class AsBfloat16(Halving, Gathered):
    """`Halving`, which names its inner tensor."""


class Same(Around):
    """Gathered as it is stored."""

    def fsdp_pre_all_gather(self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> Any:
        return (self._padded(mesh, outer_size),), None

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None) -> Any:
        (tensor,) = outputs
        if out is None:
            made = tensor.to(param_dtype)
            return made, (tensor, made)
        if out.data_ptr() != tensor.data_ptr():
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
                out.copy_(tensor[: out.shape[0]])
        return None


class SameAround(Same, Gathered):
    """`Same`, which names its inner tensor."""


class InAnyDimension(Same):
    """`Same`, with rows along any dimension, which are not padded."""

    def fsdp_pre_all_gather(self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> Any:
        return (self._data,), outer_size

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None) -> Any:
        whole = outputs[0].view(-1, *metadata[1:])[: metadata[0]]
        return super().fsdp_post_all_gather((whole,), metadata, param_dtype, out=out)


class AsInt8(Gathered):
    """A quarter of the bytes of float32, plus a scale for each row."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        self.calls.append("pre")
        scale = self._data.abs().amax(tuple(range(1, self._data.dim())), keepdim=True).clamp(min=1e-12) / 127
        return ((self._data / scale).round().to(torch.int8), scale), None

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None) -> Any:
        self.calls.append("post" if out is None else "refill")
        rounded, scale = outputs
        made = (rounded * scale).to(param_dtype)
        if out is None:
            return made, (rounded, scale, made)
        out = getattr(out, "_local_tensor", out)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
            out.copy_(made[: out.shape[0]])
        return None


def extend(model: nn.Module, kind: Callable[[torch.Tensor], Any], where: type[nn.Module] = nn.Linear) -> nn.Module:
    """Convert the weights of modules of class `where` in `model` to `kind`."""
    for module in model.modules():
        if isinstance(module, where):
            module.weight = nn.Parameter(kind(module.weight.detach()), module.weight.requires_grad)  # type: ignore[arg-type]
    return model
