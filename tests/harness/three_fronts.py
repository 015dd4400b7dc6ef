"""One model under each of the three forms in which users meet its parameters: flat, original, of `fully_shard`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from flatfsdp import FullyShardedDataParallel, fully_shard

FRONTS = ("flat", "original", "fully_shard")


def sharded(front: str, model: nn.Module, units: tuple[type[nn.Module], ...] = (), **options: Any) -> nn.Module:
    """`model` with `units`, and the root, sharded by `front`; options of the wrapper or of `fully_shard`."""
    if front != "fully_shard":
        chosen = set(units) if units else None
        return FullyShardedDataParallel(model, auto_wrap_policy=chosen, use_orig_params=front == "original", **options)
    options.setdefault("mesh", init_device_mesh("cpu", (dist.get_world_size(),)))
    for module in reversed([each for each in model.modules() if each is not model and isinstance(each, units)]):
        fully_shard(module, **options)
    fully_shard(model, **options)
    return model


def whole_values(front: str, model: nn.Module) -> dict[str, Tensor]:
    """Copies of the whole parameters by their names. Collective."""
    if front != "fully_shard":
        with FullyShardedDataParallel.summon_full_params(model, writeback=False):
            return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    found: dict[str, Any] = dict(model.named_parameters())
    return {name: parameter.full_tensor().detach().clone() for name, parameter in found.items()}


def unlike(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    """A line for each name whose values differ."""
    assert list(found) == list(expected), (list(found), list(expected))
    return [
        f"{name}: {(found[name] - expected[name]).abs().max().item()}"
        for name in expected
        if not torch.allclose(found[name], expected[name], rtol=1e-4, atol=1e-5)
    ]
