"""An optimizer with states of 8 bits in the form of torchao's, for where that is not installed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Quantized(Tensor):
    """Codes of a byte for each element, and a scale for each block of them."""

    codes: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Quantized:
        made: Quantized = Tensor._make_wrapper_subclass(cls, codes.shape, device=codes.device, dtype=dtype)
        made.codes, made.scale = codes, scale
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        (this,) = args
        if func is torch.ops.aten.detach.default:
            return Quantized(this.codes, this.scale, this.dtype)
        if func in (torch.ops.aten._to_copy.default, torch.ops.aten.clone.default):
            return Quantized(this.codes.clone(), this.scale.clone(), (kwargs or {}).get("dtype", this.dtype))
        raise NotImplementedError(func)

    def __deepcopy__(self, memo: Any) -> Quantized:
        return Quantized(self.codes.clone(), self.scale.clone(), self.dtype)

    def float_values(self) -> Tensor:
        blocks = self.codes.view(torch.int8).float().reshape(len(self.scale), -1)
        return (blocks * self.scale[:, None] / 127).view(self.codes.shape)

    def set(self, values: Tensor) -> None:
        blocks = values.reshape(len(self.scale), -1)
        self.scale.copy_(blocks.abs().amax(1))
        codes = (blocks / self.scale.clamp(min=1e-30)[:, None] * 127).round().to(torch.int8)
        self.codes.view(torch.int8).copy_(codes.view(self.codes.shape))


class LowBitAdam(torch.optim.Optimizer):
    """Adam without bias correction, with the names and the rule of torchao's: quantized from 4,096 elements on."""

    def __init__(self, params: Any, lr: float = 1e-3, *, block_size: int = 256) -> None:
        super().__init__(params, {"lr": lr, "amsgrad": False})
        self.block_size = block_size

    def _new_buffer(self, p: Tensor, signed: bool) -> Tensor:
        quantized = p.numel() >= 4096 and p.numel() % self.block_size == 0
        return self._subclass_zeros(p, signed, self.block_size) if quantized else torch.zeros_like(p)

    @staticmethod
    def _subclass_zeros(p: Tensor, signed: bool, block_size: int) -> Tensor:
        codes = torch.zeros(p.shape, dtype=torch.uint8)
        return Quantized(codes, torch.zeros(p.numel() // block_size), p.dtype)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in (each for each in group["params"] if each.grad is not None):
                state = self.state[p]
                if not state:
                    state["step"] = torch.tensor(0.0)
                    state["exp_avg"], state["exp_avg_sq"] = self._new_buffer(p, True), self._new_buffer(p, False)
                state["step"] += 1
                p, grad = (getattr(each, "_local_tensor", each) for each in (p, p.grad))
                new = []
                for name, value, factor in (("exp_avg", grad, 0.1), ("exp_avg_sq", grad.square(), 0.01)):
                    kept = getattr(state[name], "_local_tensor", state[name])
                    before = kept.float_values() if isinstance(kept, Quantized) else kept
                    new.append(before.lerp(value, factor))
                    kept.set(new[-1]) if isinstance(kept, Quantized) else kept.copy_(new[-1])
                p.sub_(new[0] / (new[1].sqrt() + 1e-8), alpha=group["lr"])
