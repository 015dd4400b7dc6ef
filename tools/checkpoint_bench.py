#!/usr/bin/env python3
"""Saving and loading a model on the CPU: seconds, bytes on disk, and memory in addition to the model.

    .venv/bin/python tools/checkpoint_bench.py [--width 5120] [--depth 8] [--ranks 2] [--folder DIR] [--rounds 3]

A stack of linear layers (210M parameters by default) over gloo, in fresh processes for each round. Compared are
flatfsdp's checkpoints and safetensors, FSDP1's full state dict on rank 0 through torch.save, read by every rank, and
FSDP2's through torch.distributed.checkpoint. Memory is anonymous resident memory (RssAnon), sampled every two
milliseconds: pages of mapped or cached files are not the process's own. "Peak" is the increase over the level before,
on the worst rank.
"""

from __future__ import annotations

import argparse
import gc
import os
import platform
import shutil
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.fsdp import FullStateDictConfig, StateDictType, fully_shard
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp.wrap import ModuleWrapPolicy as FSDP1Policy

from flatfsdp import FullyShardedDataParallel, checkpoint
from flatfsdp.wrap import ModuleWrapPolicy
from tools.benchmark import ranks
from tools.benchmark.ranks import World

MIB = 2**20


@dataclass(frozen=True)
class Size:
    """The size of the model."""

    width: int
    depth: int

    def build(self) -> nn.Sequential:
        """A new model, the same on every rank."""
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(self.width, self.width) for _ in range(self.depth)))


class Sampler:
    """The peak of anonymous memory inside the context, minus the level at its beginning, in bytes."""

    def __enter__(self) -> Sampler:
        gc.collect()
        self.added = 0
        self._before = _anonymous()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        self._start = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self._start
        self._over.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._over.wait(0.002):
            self.added = max(self.added, _anonymous() - self._before)


def _anonymous() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("this kernel does not report RssAnon")


Step = Callable[[nn.Module, Path], None]


def _ours(size: Size) -> nn.Module:
    return FullyShardedDataParallel(size.build(), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), use_orig_params=True)


def _fsdp1(size: Size) -> nn.Module:
    policy = FSDP1Policy({nn.Linear})
    return FSDP1(size.build(), auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu"))


def _fsdp2(size: Size) -> nn.Module:
    model = size.build()
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


def _save_whole(model: nn.Module, folder: Path) -> None:
    # Not offload_to_cpu=True: on a CPU, that frees memory which the state dict still uses.
    with FSDP1.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(rank0_only=True)):
        state = model.state_dict()
    if dist.get_rank() == 0:
        folder.mkdir()
        torch.save(state, folder / "model.pt")
    dist.barrier()


def _load_whole(model: nn.Module, folder: Path) -> None:
    with FSDP1.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig()):
        model.load_state_dict(torch.load(folder / "model.pt", map_location="cpu"))


def _load_dcp(model: nn.Module, folder: Path) -> None:
    state = dcp_state.get_model_state_dict(model)
    dcp.load(state, checkpoint_id=folder)
    dcp_state.set_model_state_dict(model, state)


WAYS: dict[str, tuple[Callable[[Size], nn.Module], Step, Step]] = {
    "flatfsdp: save, load": (
        _ours,
        lambda model, folder: checkpoint.save(folder, model=model),
        lambda model, folder: checkpoint.load(folder, model=model),
    ),
    "flatfsdp: export_safetensors, load_safetensors": (
        _ours,
        lambda model, folder: checkpoint.export_safetensors(model, folder, max_shard_size="500MB"),
        lambda model, folder: checkpoint.load_safetensors(model, folder),
    ),
    "FSDP1: whole state dict, torch.save": (_fsdp1, _save_whole, _load_whole),
    "FSDP2: torch.distributed.checkpoint": (
        _fsdp2,
        lambda model, folder: dcp.save(dcp_state.get_model_state_dict(model), checkpoint_id=folder),
        _load_dcp,
    ),
}


def measure(rank: int, way: str, size: Size, folder: str) -> dict[str, float]:
    """Measure one round on one rank."""
    warnings.simplefilter("ignore")
    build, save, load = WAYS[way]
    model, path = build(size), Path(folder) / "saved"
    parts = [each.detach().to_local() if hasattr(each, "to_local") else each.detach() for each in model.parameters()]
    before = [part.clone() for part in parts]
    found: dict[str, float] = {"held": sum(part.nbytes for part in parts)}
    for name, step in (("save", save), ("load", load)):
        dist.barrier()
        with Sampler() as sampler:
            step(model, path)
        found |= {f"{name} seconds": sampler.seconds, f"{name} peak": sampler.added}
        if name == "save":
            with torch.no_grad():
                for part in parts:
                    part.zero_()
    now = [each.detach().to_local() if hasattr(each, "to_local") else each.detach() for each in model.parameters()]
    assert all(torch.equal(one, other) for one, other in zip(now, before, strict=True)), f"{way} lost something"
    found["disk"] = sum(each.stat().st_size for each in path.rglob("*") if each.is_file())
    return found


def main() -> int:
    """Print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=5120)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--folder", type=Path, help="folder to write to, on a disk with enough room (default: a temporary one)"
    )
    given = parser.parse_args()
    size = Size(given.width, given.depth)
    numel = size.depth * size.width * (size.width + 1)
    print(
        f"{numel / 1e6:.0f}M parameters, {numel * 4 / MIB:.0f} MiB, {given.ranks} ranks; torch {torch.__version__}, "
        f"{platform.machine()}, {os.cpu_count()} cores; medians of {given.rounds} rounds (seconds with their range)\n"
    )
    print("| way | save s | peak MiB | load s | peak MiB | MiB on disk |\n|---|---|---|---|---|---|")
    for way in WAYS:
        rounds = []
        for _ in range(given.rounds):
            folder = tempfile.mkdtemp(dir=given.folder)
            try:
                results = ranks.run(World(given.ranks, "gloo"), measure, way, size, folder)
            finally:
                shutil.rmtree(folder)
            rounds.append({key: max(each[key] for each in results) for key in results[0]})
        cells = [way]
        for step in ("save", "load"):
            times = [each[f"{step} seconds"] for each in rounds]
            cells.append(f"{median(times):.2f} ({min(times):.2f} to {max(times):.2f})")
            cells.append(f"{median(each[f'{step} peak'] for each in rounds) / MIB:.0f}")
        cells.append(f"{rounds[0]['disk'] / MIB:.0f}")
        print(f"| {' | '.join(cells)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
