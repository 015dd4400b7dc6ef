"""What a program ends with, in a file for each rank: numbers on its way, and the shards of its parameters."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor


def fsdp_of(module: nn.Module) -> str:
    """The package whose FSDP2 has sharded something in `module`."""
    bases = {base for each in module.modules() for base in type(each).__mro__ if base.__name__ == "FSDPModule"}
    return ", ".join(sorted(base.__module__.partition(".")[0] for base in bases)) or "none"


def described(parameter: torch.Tensor) -> dict[str, Any]:
    if not isinstance(parameter, DTensor):
        return {"local": parameter.detach().clone(), "spec": f"{tuple(parameter.shape)}"}
    names = parameter.device_mesh.mesh_dim_names
    spec = f"{tuple(parameter.shape)} {parameter.placements} {names} {parameter.device_mesh.mesh.tolist()}"
    local = parameter.to_local().detach()
    return {"local": getattr(local, "_tensor", local).clone(), "spec": spec}  # torchao has the master's in a class


def write(folder: str | Path, values: Iterable[float], *modules: nn.Module, also: str = "") -> None:
    """Write what this rank ends with; `also`: the name of another part of what the program does."""
    parameters = {
        f"{number}: {name}": described(parameter)
        for number, module in enumerate(modules)
        for name, parameter in module.named_parameters()
    }
    found = {"fsdp": fsdp_of(nn.ModuleList(modules)), "values": [*values], "parameters": parameters}
    torch.save(found, Path(folder) / f"{also}rank{dist.get_rank()}.pt")
