"""The result of a program, in a file for each rank: numbers recorded on the way, and its parameters: their shards, or
unsharded ones where FSDP1 has flattened them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, _flat_param, _init_utils, fully_sharded_data_parallel
from torch.distributed.tensor import DTensor

# Gaps of torch's FSDP1 on a CPU: it requires a device, takes "cpu" and "cpu:0" for two, and frees a tensor that is to
# be moved to the CPU and is there already.
_of_device = fully_sharded_data_parallel._init_device_handle
fully_sharded_data_parallel._init_device_handle = lambda *given: _of_device(*given[:3], torch.device("cpu"))
_init_utils._get_device_from_device_id = lambda *named: None
_flat_param.FlatParamHandle.to_cpu = contextlib.nullcontext

KINDS = ("FSDPModule", "FullyShardedDataParallel")
WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")


def fsdp_of(module: nn.Module) -> str:
    """The package whose FSDP has sharded something in `module`."""
    bases = {base for each in module.modules() for base in type(each).__mro__ if base.__name__ in KINDS}
    return ", ".join(sorted({base.__module__.partition(".")[0] for base in bases})) or "none"


def described(parameter: torch.Tensor) -> dict[str, Any]:
    if not isinstance(parameter, DTensor):
        return {"local": parameter.detach().clone(), "spec": f"{tuple(parameter.shape)}"}
    names = parameter.device_mesh.mesh_dim_names
    spec = f"{tuple(parameter.shape)} {parameter.placements} {names} {parameter.device_mesh.mesh.tolist()}"
    local = parameter.to_local().detach()
    return {"local": getattr(local, "_tensor", local).clone(), "spec": spec}  # torchao has the master's in a class


def parameters_of(module: nn.Module) -> Iterator[tuple[str, dict[str, Any]]]:
    wrapped = any(isinstance(each, FullyShardedDataParallel) for each in module.modules())
    with FullyShardedDataParallel.summon_full_params(module, writeback=False) if wrapped else torch.no_grad():
        for name, parameter in module.named_parameters():
            for each in WRAPPERS if wrapped else ():
                name = name.replace(each, "")
            yield name, described(parameter)


def write(folder: str | Path, values: Iterable[float], *modules: nn.Module, also: str = "") -> None:
    """Write this rank's result; `also`: the name of another part of the program."""
    parameters = {
        f"{number}: {name}": found for number, module in enumerate(modules) for name, found in parameters_of(module)
    }
    found = {"fsdp": fsdp_of(nn.ModuleList(modules)), "values": [*values], "parameters": parameters}
    torch.save(found, Path(folder) / f"{also}rank{dist.get_rank()}.pt")
