"""Ranks: spawn them on this machine, or join the world that torchrun made.

Both end in the same call, `job(world, options)`, once on every rank, inside an initialised process group.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from flatfsdp import keep_host_memory
from flatfsdp.errors import ConfigValueError
from flatfsdp.trainer.options import Options

RANKS_ON_CPU = 2


@dataclass(frozen=True)
class World:
    """Where one rank stands.

    Attributes:
        rank: this process among all, 0 to size - 1.
        size: number of processes.
        device: the device that this rank computes on.
    """

    rank: int
    size: int
    device: torch.device


Job = Callable[[World, Options], None]


def under_launcher() -> bool:
    """Whether torchrun, or something that speaks its environment variables, started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


@dataclass(frozen=True)
class Plan:
    """How many ranks there will be in total, on which type of device."""

    ranks: int
    device_type: str

    @classmethod
    def of(cls, options: Options) -> Plan:
        """What `options` and the environment ask for.

        Raises:
            ConfigValueError: this machine, or the world that was given, cannot provide it.
        """
        device_type = options.device
        if device_type == "auto":
            device_type = "cuda" if _device_count("cuda") else "cpu"
        devices = _device_count(device_type)
        if not devices:
            raise ConfigValueError(f"argument --device: this machine has no {device_type!r} device that torch can use")
        if under_launcher():
            ranks = int(os.environ["WORLD_SIZE"])
            if options.ranks not in (None, ranks):
                raise ConfigValueError(f"argument --ranks: the launcher started {ranks} ranks, not {options.ranks}")
            here = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
        else:
            ranks = here = options.ranks or (RANKS_ON_CPU if device_type == "cpu" else devices)
        if device_type != "cpu" and here > devices:
            raise ConfigValueError(
                f"argument --ranks: {here} ranks on this machine, but {devices} {device_type} devices"
            )
        if options.replicas is not None and ranks % options.replicas:
            raise ConfigValueError(f"argument --replicas: {ranks} ranks cannot form {options.replicas} equal replicas")
        return cls(ranks=ranks, device_type=device_type)


def run(job: Job, plan: Plan, options: Options) -> None:
    """Run `job` on every rank of `plan`; returns when those that this process is responsible for are done."""
    if under_launcher():
        rank = int(os.environ["RANK"])
        _run_rank(rank, int(os.environ.get("LOCAL_RANK", rank)), None, job, plan, options)
        return
    # The parent keeps the store: its port is taken before any rank starts, so none can be lost to another program.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = mp.spawn(_spawned, args=(store.port, job, plan, options), nprocs=plan.ranks, join=False)
    try:
        while not ranks.join():
            pass
    finally:
        for process in ranks.processes:  # after an interrupt that reached only this process they would train on
            process.terminate()


def _spawned(rank: int, port: int, job: Job, plan: Plan, options: Options) -> None:
    ranks = str(plan.ranks)
    # What torchrun would have set: hybrid strategies read which ranks share a node, logs read the rank.
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=ranks, LOCAL_WORLD_SIZE=ranks)
    if plan.device_type == "cpu":
        torch.set_num_threads(max(1, _cores() // plan.ranks))
    _run_rank(rank, rank, dist.TCPStore("127.0.0.1", port, is_master=False), job, plan, options)


def _run_rank(rank: int, local_rank: int, store: dist.Store | None, job: Job, plan: Plan, options: Options) -> None:
    device = torch.device(plan.device_type)
    if device.type == "cpu":
        keep_host_memory()
    else:
        device = torch.device(device.type, local_rank)
        torch.get_device_module(device).set_device(device)
    dist.init_process_group(
        dist.get_default_backend_for_device(device.type),
        store=store,
        rank=rank,
        world_size=plan.ranks,
        device_id=None if device.type == "cpu" else device,
    )
    try:
        job(World(rank=rank, size=plan.ranks, device=device), options)
    finally:
        dist.destroy_process_group()


def _device_count(device_type: str) -> int:
    """How many devices of that type torch can use here; 1 for the CPU and 0 for a type that torch does not know."""
    if device_type == "cpu":
        return 1
    try:
        module = torch.get_device_module(device_type)
    except (RuntimeError, AttributeError):
        return 0
    return int(module.device_count()) if module.is_available() else 0


def _cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
