"""Units inside torch's data parallelism of whole models: `DistributedDataParallel` and the composable `replicate`.

Both average gradients over ranks that hold the same tensors, and shards are different ones. `replicate` leaves alone
modules that are registered as sharded, so that units reduce their own gradients and it reduces those of the rest. DDP
knows no such modules: it broadcasts rank 0's shards to all ranks and adds up gradients of different parameters, which
is refused, unless its list of ignored parameters has theirs.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from ...errors import UsageError
from ..base import _torch
from ..runtime.module_tree import units_at
from ..runtime.unit import Unit

_REMEDY = (
    "Shard the model around it as well, with a 2-D mesh (replicate, shard) for several replicas, instead of "
    "DistributedDataParallel"
)


@functools.cache
def watch(front: type[nn.Module]) -> None:
    """Register modules of the class `front` as sharded, and refuse DDP around them from now on."""
    _torch.register_as_sharded(front)
    _refuse_in_ddp()


@functools.cache
def _refuse_in_ddp() -> None:
    register_module_module_registration_hook(_before_ddp)


def _before_ddp(module: nn.Module, name: str, child: Any) -> None:
    """At `ddp.module = child` in the constructor of DDP, which has broadcast nothing yet."""
    if name == "module" and isinstance(module, DistributedDataParallel) and isinstance(child, nn.Module):
        _check_not_in(module, child)


def _check_not_in(ddp: DistributedDataParallel, module: nn.Module) -> None:
    ignored = ddp.parameters_to_ignore
    for path, each in module.named_modules():
        for unit in units_at(each):
            for name, _ in each.named_parameters(path):
                if name not in ignored:
                    raise UsageError(
                        f"DistributedDataParallel over {type(module).__name__}: its module {path or '<root>'} "
                        f"({unit.entries.class_name}) is sharded by flatfsdp, and {name!r} is a different piece of the "
                        "parameter on each rank, which DistributedDataParallel would overwrite with rank 0's. "
                        f"{_REMEDY}; or use torch's composable replicate(), which leaves sharded modules alone"
                    )


def check_enclosing(units: Iterable[Unit]) -> None:
    """At the first forward: refuse units whose forward runs inside a DDP that was constructed before them, or that
    averages other parameters over ranks across theirs."""
    if (active := _torch.active_ddp()) is None:
        return
    ddp, ranks = active
    _check_not_in(ddp, ddp.module)
    for unit in units:
        groups = unit.groups
        own = {*groups.shard.ranks, *(groups.replicate.ranks if groups.replicate is not None else ())}
        if not own <= ranks:
            _torch.end_active_ddp()  # torch leaves a `replicate` active after an exception, also for other models
            raise UsageError(
                f"unit {unit.label} runs inside replicate() over ranks {sorted(ranks)}, and is itself sharded over "
                f"ranks {sorted(own)}: its gradients would not be averaged over the first, nor those of the modules "
                f"around it over the second. {_REMEDY}"
            )
