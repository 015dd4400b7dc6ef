"""`python -m flatfsdp.env`: the facts about the machine for a bug report, as lines to paste."""

from __future__ import annotations

import os
import platform
import sys
from importlib import metadata

import torch
import torch.distributed as dist

import flatfsdp

# Variables that change the behavior or output of ranks; the rest of the environment is private.
PREFIXES = ("NCCL_", "TORCH_", "TORCHELASTIC_", "GLOO_", "CUDA_", "PYTORCH_", "OMP_", "MKL_", "FLATFSDP_")
RENDEZVOUS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
EXTRAS = ("numpy", "pydantic", "tqdm", "safetensors", "matplotlib", "accelerate", "transformers", "peft", "lightning")


def describe() -> str:
    """The facts as text, one line each: "name: value"."""
    facts = {
        "flatfsdp": flatfsdp.__version__,
        "torch": f"{torch.__version__} (CUDA {torch.version.cuda or 'none'}, debug {torch.version.debug})",
        "python": f"{platform.python_version()} ({platform.python_implementation()}), {sys.executable}",
        "system": f"{platform.platform()}, {platform.machine()}",
        "cores": f"{os.cpu_count()}, torch uses {torch.get_num_threads()} threads",
        "backends": ", ".join(_backends()) or "none: torch was built without torch.distributed",
        "devices": ", ".join(_devices()) or "cpu only",
        "shared memory": _shared_memory(),
        "packages": ", ".join(_packages()) or "none of those that flatfsdp supports",
    }
    facts |= {name: value for name, value in sorted(os.environ.items()) if _relevant(name)}
    return "\n".join(f"{name}: {value}" for name, value in facts.items())


def _backends() -> list[str]:
    if not dist.is_available():
        return []
    built = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available(), "mpi": dist.is_mpi_available()}
    return [name for name, there in built.items() if there]


def _devices() -> list[str]:
    accelerator = torch.get_device_module()
    if not hasattr(accelerator, "get_device_name"):
        return []
    return [accelerator.get_device_name(index) for index in range(accelerator.device_count())]


def _shared_memory() -> str:
    """Whether ranks on this host can exchange CPU tensors through memory."""
    why = flatfsdp.share_host_memory(None)
    return f"no: {why}" if why else "yes"


def _packages() -> list[str]:
    found = []
    for name in EXTRAS:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return found


def _relevant(name: str) -> bool:
    return name in RENDEZVOUS or name.startswith(PREFIXES)


if __name__ == "__main__":
    print(describe())
