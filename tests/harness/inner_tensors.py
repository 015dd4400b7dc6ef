"""Tensors with FSDP2's extensions of the all-gather whose class keeps their rows: made of two tensors (`Pair`), or
quantized, in rows that are trained (`Rounded`) or in frozen blocks that cross rows (`Blocks`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from .gather_hooks import AsBfloat16, Halving

_aten = torch.ops.aten
BLOCK = 4


def _memoryless(kind: type[torch.Tensor], shape: Any, dtype: torch.dtype, device: torch.device) -> Any:
    return torch.Tensor._make_wrapper_subclass(kind, shape, dtype=dtype, device=device)


def padded(rows: torch.Tensor, mesh: Any, outer_size: torch.Size) -> torch.Tensor:
    """`rows` of a whole of that size, padded to those of the first rank."""
    most = -(-outer_size[0] // mesh.size())
    return torch.cat([rows, rows.new_zeros(most - rows.shape[0], *rows.shape[1:])])


class Pair(torch.Tensor):
    """Two tensors of one shape; every operation runs on both."""

    one: torch.Tensor
    two: torch.Tensor

    @staticmethod
    def __new__(cls, one: torch.Tensor, two: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls, one.shape, strides=one.stride(), dtype=one.dtype, device=one.device
        )

    def __init__(self, one: torch.Tensor, two: torch.Tensor) -> None:
        self.one, self.two = one, two

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Pair:
        """A pair of the tensor and its double."""
        return cls(tensor.clone(), tensor * 2)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["one", "two"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], context: Any, size: Any, stride: Any) -> Any:
        return cls(inner["one"], inner["two"])

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"{type(self).__name__}({self.one}, {self.two})"

    @classmethod
    def __torch_dispatch__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        def on(name: str) -> Any:
            return func(
                *pytree.tree_map_only(Pair, lambda each: getattr(each, name), args),
                **pytree.tree_map_only(Pair, lambda each: getattr(each, name), kwargs or {}),
            )

        first, second = on("one"), on("two")
        flat, spec = pytree.tree_flatten(first)
        made = [
            cls(a, b) if isinstance(a, torch.Tensor) else a
            for a, b in zip(flat, pytree.tree_leaves(second), strict=True)
        ]
        if func._schema.is_mutable and isinstance(args[0], torch.Tensor):  # type: ignore[attr-defined]
            return args[0]
        return pytree.tree_unflatten(made, spec)

    def fsdp_pre_all_gather(self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> Any:
        return (padded(self.one, mesh, outer_size), padded(self.two, mesh, outer_size)), None

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None) -> Any:
        if out is None:
            made = Pair(*(each.to(param_dtype) for each in outputs))
            return made, (*outputs, made.one, made.two)
        out = getattr(out, "_local_tensor", out)
        for mine, each in zip((out.one, out.two), outputs, strict=True):
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(mine):
                mine.copy_(each[: mine.shape[0]])
        return None


class Stored(torch.Tensor):
    """Codes and scales of quantized numbers. Operations that are not listed run on the numbers; in-place ones quantize
    their result again."""

    codes: torch.Tensor
    scales: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scales: torch.Tensor, shape: Any, dtype: torch.dtype) -> Any:
        return _memoryless(cls, shape, dtype, codes.device)

    def __init__(self, codes: torch.Tensor, scales: torch.Tensor, shape: Any, dtype: torch.dtype) -> None:
        self.codes, self.scales = codes, scales

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Stored:
        """The tensor, quantized."""
        return cls(*cls.quantized(tensor), tensor.shape, tensor.dtype)

    @staticmethod
    def quantized(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        raise NotImplementedError

    def numbers(self) -> torch.Tensor:
        """The numbers that are stored."""
        raise NotImplementedError

    def part(self, start: int, stop: int) -> Any:
        raise NotImplementedError

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scales"], (self.shape, self.dtype)

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], context: Any, size: Any) -> Any:
        return cls(inner["codes"], inner["scales"], *context)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"{type(self).__name__}({self.codes}, {self.scales})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        kwargs, this = kwargs or {}, args[0]
        if func is _aten.copy_.default and isinstance(this, Stored):
            if isinstance(args[1], Stored):
                new = args[1].codes, args[1].scales
            else:
                new = cls.quantized(args[1].to(this.dtype))
            this.codes.copy_(new[0])
            this.scales.copy_(new[1])
            return this
        if isinstance(this, Stored):
            size = this.shape[0] if this.dim() else 1
            if func in (_aten.detach.default, _aten.clone.default, _aten._to_copy.default):
                kwargs.pop("memory_format", None)
                dtype, kwargs = (
                    kwargs.pop("dtype", None) or this.dtype,
                    {k: v for k, v in kwargs.items() if k == "device"},
                )
                return cls(func(this.codes, **kwargs), func(this.scales, **kwargs), this.shape, dtype)
            if func is _aten.empty_like.default:
                device = kwargs.get("device") or this.device
                codes, scales = (torch.empty_like(each, device=device) for each in (this.codes, this.scales))
                return cls(codes, scales, this.shape, kwargs.get("dtype") or this.dtype)
            if func is _aten.new_zeros.default:
                return cls.of(torch.zeros(args[1], dtype=this.dtype, device=this.device))
            if func is _aten.split.Tensor:
                return [this.part(start, min(start + args[1], size)) for start in range(0, size, args[1])]
            if func is _aten.slice.Tensor and (args[1:2] or (0,)) == (0,):
                return this.part(args[2] or 0, min(args[3], size))
            if func in (_aten.view.default, _aten.as_strided.default):
                return this.detach()
        plain, others = pytree.tree_map_only(Stored, lambda each: each.numbers(), (args, kwargs))
        made = func(*plain, **others)
        if func._schema.is_mutable and isinstance(this, Stored):
            return this.copy_(plain[0])
        return made


class Rounded(Stored):
    """Rows of int8, with a scale for each: trained, modules compute with plain numbers."""

    @staticmethod
    def quantized(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scales = tensor.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127 if tensor.numel() else tensor[:, :1]
        return (tensor / scales).round().to(torch.int8), scales.float()

    def numbers(self) -> torch.Tensor:
        return (self.codes * self.scales).to(self.dtype)

    def part(self, start: int, stop: int) -> Rounded:
        rows = slice(start, max(start, stop))
        codes = self.codes[rows]
        return type(self)(codes, self.scales[rows], codes.shape, self.dtype)

    def fsdp_pre_all_gather(self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> Any:
        return (padded(self.codes, mesh, outer_size), padded(self.scales, mesh, outer_size)), None

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None) -> Any:
        made = (outputs[0] * outputs[1]).to(param_dtype)
        if out is None:
            return made, (*outputs, made)
        out = getattr(out, "_local_tensor", out)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
            out.copy_(made[: out.shape[0]])
        return None


class Blocks(Stored):
    """Blocks of numbers, in the order of memory: frozen, modules compute with `numbers()` of what is gathered."""

    @staticmethod
    def quantized(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        flat = tensor.reshape(-1, BLOCK)
        scales = flat.abs().amax(1).clamp(min=1e-12) / 7
        return (flat / scales[:, None]).round().to(torch.int8).reshape(-1), scales.to(torch.bfloat16)

    def numbers(self) -> torch.Tensor:
        flat = self.codes.view(-1, BLOCK) * self.scales[:, None].float()
        return flat.to(self.dtype).view(self.shape)

    def part(self, start: int, stop: int) -> Blocks:
        shape = (max(0, stop - start), *self.shape[1:])
        first, numel = start * self.shape[1:].numel(), shape[0] * self.shape[1:].numel()
        codes = self.codes[first : first + numel]
        return type(self)(codes, self.scales[first // BLOCK : (first + numel) // BLOCK], shape, self.dtype)

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self.codes, self.scales), (self.shape, mesh.size())

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None) -> Any:
        if out is not None:
            assert isinstance(out, Blocks) and out.codes.data_ptr() == outputs[0].data_ptr()
            return None
        shape, ranks = metadata
        return Blocks(*outputs, torch.Size((shape[0] * ranks, *shape[1:])), param_dtype), outputs


class Unnamed(Halving):
    """A tensor around another one that cannot be found by its class."""


class OfThree(AsBfloat16):
    """Rebuilt from its shape, without strides."""

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], context: Any, size: Any) -> Any:  # type: ignore[override]
        assert inner["_data"].shape == size
        return cls(inner["_data"])


class Columns(AsBfloat16):
    """Split along any dimension: ranks have equal parts, and what is gathered is in the order of the whole. The first
    result has another shape than the whole, of whose memory it is."""

    def fsdp_pre_all_gather(self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> Any:
        self.calls.append("pre")
        return (self._data.view(-1).view(self._data.shape).to(torch.bfloat16),), None

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None) -> Any:
        if out is None:
            return super().fsdp_post_all_gather(outputs, metadata, param_dtype)
        out = getattr(out, "_local_tensor", out)
        return super().fsdp_post_all_gather((outputs[0].view(out.shape),), metadata, param_dtype, out=out)


class PairOfColumns(Pair):
    """`Pair`, split along any dimension."""

    def fsdp_pre_all_gather(self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> Any:
        return (self.one.flatten(), self.two), outer_size

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None) -> Any:
        size = metadata if out is None else out.shape
        return super().fsdp_post_all_gather([each.view(size) for each in outputs], metadata, param_dtype, out=out)


class Linear(nn.Linear):
    """A layer whose weight may be `Blocks`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight.numbers() if isinstance(self.weight, Stored) else self.weight
        return torch.nn.functional.linear(x, weight, self.bias)


class Net(nn.Module):
    """Layers with weights of `kind`, beside plain parameters."""

    def __init__(self, kind: Any, width: int = 8, hidden: int = 12) -> None:
        super().__init__()
        sizes = [(width, hidden), (hidden, width), (width, hidden), (hidden, width)]
        self.layers = nn.ModuleList(Linear(*size, bias=number == 1) for number, size in enumerate(sizes))
        self.gain = nn.Parameter(torch.ones(width))
        for layer in self.layers[:3]:
            made = kind.of(layer.weight.detach()) if hasattr(kind, "of") else kind(layer.weight.detach())
            layer.weight = nn.Parameter(made, requires_grad=kind is not Blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.gain
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x
