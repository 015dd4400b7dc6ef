"""Optimizers with states of 8 bits in the forms of torchao's and bitsandbytes', for where these are not installed."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
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


class Optimizer2State(torch.optim.Optimizer):
    """bitsandbytes' class of optimizers with two states, in the parts that are read."""

    optimizer_name = "adam"

    def __init__(self, params: Any, lr: float = 1e-3, *, min_8bit_size: int = 4096) -> None:
        super().__init__(params, {"lr": lr})
        self.name2qmap: dict[str, Tensor] = {}
        self.mng = SimpleNamespace(index2config={})
        self.least = min_8bit_size

    def fill_qmap(self) -> None:
        self.name2qmap = {"dynamic": torch.linspace(-1, 1, 256), "udynamic": torch.linspace(0, 1, 256)}

    def check_overrides(self) -> None:
        """None."""

    def get_config(self, gindex: int, pindex: int, group: Any) -> dict[str, int]:
        return {"optim_bits": 8, "min_8bit_size": self.least}

    def init_state(self, group: Any, p: Tensor, gindex: int, pindex: int) -> None:
        config, state = self.get_config(gindex, pindex, group), self.state[p]
        state["step"] = 0
        for number, kind in ((1, "dynamic"), (2, "udynamic")):
            quantized = p.numel() >= config["min_8bit_size"]
            state[f"state{number}"] = torch.zeros_like(p, dtype=torch.uint8 if quantized else torch.float32)
            if quantized:
                if not self.name2qmap:
                    self.fill_qmap()
                state[f"qmap{number}"] = self.name2qmap[kind]
                state[f"absmax{number}"] = torch.zeros(-(-p.numel() // 256))

    def state_dict(self) -> dict[str, Any]:
        found = super().state_dict()
        found["state"] = {key: {"hidden": {**each}} for key, each in found["state"].items()}
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        states = {key: each.get("hidden", each) for key, each in state_dict["state"].items()}
        params = [each for group in self.param_groups for each in group["params"]]
        self.state.clear()
        self.state |= {params[key]: {**each} for key, each in states.items()}


class AdamOf8Bits(Optimizer2State):
    """Adam without bias correction, with bitsandbytes' names and rule: quantized from 4,096 elements on, in blocks of
    256, of which the last may be smaller."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for gindex, group in enumerate(self.param_groups):
            for pindex, p in enumerate(group["params"]):
                if p.grad is None:
                    continue
                if not self.state[p]:
                    self.init_state(group, p, gindex, pindex)
                state, new = self.state[p], []
                state["step"] += 1
                for number, value, factor in ((1, p.grad, 0.1), (2, p.grad.square(), 0.01)):
                    kept, scales = state[f"state{number}"], state.get(f"absmax{number}")
                    if scales is None:
                        new.append(kept.lerp_(value, factor))
                        continue
                    values = state[f"qmap{number}"]
                    before = [values[codes.long()] * scale for codes, scale in _blocks(kept, scales)]
                    new.append(torch.cat(before).view(p.shape).lerp(value, factor))
                    for (codes, scale), block in zip(_blocks(kept, scales), new[-1].view(-1).split(256), strict=True):
                        scale.copy_(block.abs().max())
                        scaled = block / scale.clamp(min=1e-30)
                        codes.copy_((scaled[:, None] - values).abs().argmin(1))
                p.sub_(new[0] / (new[1].sqrt() + 1e-8), alpha=group["lr"])


def _blocks(codes: Tensor, scales: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    yield from zip(codes.view(-1).split(256), scales.unbind(), strict=True)
