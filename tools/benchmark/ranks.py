"""Fresh processes for every measurement, quickly: forked from a server that has only imported torch."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import fake_pg  # noqa: F401 - importing it registers the backend "fake"

_FRESH = multiprocessing.get_context("forkserver")
_PRELOADED = ["torch.distributed.fsdp", "torch.testing._internal.distributed.fake_pg"]
_FRESH.set_forkserver_preload(_PRELOADED)


class RankFailed(Exception):
    """A rank raised, died, or did not answer in time; the message has the traceback, or the cause of death."""


@dataclass(frozen=True)
class World:
    """The process group of a job.

    Attributes:
        size: the number of ranks; each is a process, except in a fake world, where only rank 0 exists.
        backend: "gloo", "nccl", "fake", "" for one process without a group, or "none" for several without one.
    """

    size: int
    backend: str

    @property
    def processes(self) -> int:
        return 1 if self.backend in ("fake", "") else self.size


def preload(modules: Sequence[str]) -> None:
    """Let the server import these, too, before the first rank starts. No import may query the number of devices."""
    _FRESH.set_forkserver_preload([*_PRELOADED, *modules])


def run(world: World, job: Callable[..., Any], *args: Any, timeout: float = 300.0) -> list[Any]:
    """``job(rank, *args)`` in a fresh process for every rank of ``world``; the results, in rank order.

    A rank computes on one thread, and the process group is initialized. Raises `RankFailed`.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes, processes = [], []
    for rank in range(world.processes):
        ours, theirs = _FRESH.Pipe(duplex=False)
        process = _FRESH.Process(target=_main, args=(rank, world, store.port, theirs, job, args), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        return _answers(pipes, processes, time.monotonic() + timeout)
    finally:
        for process in processes:
            process.join(0.5)
            process.kill()
            process.join()


def _answers(pipes: list[Connection], processes: list[Any], deadline: float) -> list[Any]:
    """The results of all ranks; raises for the first that fails, without waiting for the others."""
    found: dict[int, Any] = {}
    while len(found) < len(pipes):
        waiting = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in found}
        ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankFailed(f"rank {min(waiting.values())} did not answer in time")
        for pipe, rank in waiting.items():
            if pipe in ready:
                found[rank] = _answer(rank, pipe, processes[rank])
    return [found[rank] for rank in range(len(pipes))]


def _answer(rank: int, pipe: Connection, process: Any) -> Any:
    try:
        result, error = pipe.recv()
    except EOFError:
        process.join(1.0)
        status = process.exitcode
        words = f"by {signal.Signals(-status).name}" if status is not None and status < 0 else f"with status {status}"
        raise RankFailed(f"rank {rank} died {words}") from None
    if error is not None:
        raise RankFailed(f"rank {rank}: {error}")
    return result


def _main(rank: int, world: World, port: int, pipe: Connection, job: Callable[..., Any], args: tuple[Any, ...]) -> None:
    faulthandler.enable()
    torch.set_num_threads(1)
    size = str(world.processes)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        if world.backend == "fake":
            fake_world(world.size)
        elif world.backend not in ("", "none"):
            if world.backend == "nccl":
                torch.cuda.set_device(rank)
            store = dist.TCPStore("127.0.0.1", port, is_master=False)
            dist.init_process_group(world.backend, store=store, rank=rank, world_size=world.size)
        result, error = job(rank, *args), None
    except BaseException:
        result, error = None, traceback.format_exc()
    pipe.send((result, error))
    if error is None and world.backend and dist.is_initialized():
        dist.destroy_process_group()


def fake_world(size: int) -> None:
    """Make this process rank 0 of a world of ``size`` whose collectives return at once and move nothing."""
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=size)
