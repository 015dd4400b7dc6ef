"""Ranks: spawn them on this machine, or join the world that a launcher made.

`run` ends in the same call of a job, `job(world, *arguments)`, once on every rank, inside a process group.
`RankContext.join` is for programs that a launcher starts, or nobody: one process is a world of one rank, on the same
path.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from flatfsdp import retain_host_memory
from flatfsdp.errors import ConfigValueError
from flatfsdp.trainer.preemption import handled_by, in_words, is_first, meant_by
from flatfsdp.trainer.rendezvous import store_of_this_start
from flatfsdp.trainer.terminal import print_line

RANKS_ON_CPU = 2
PATIENCE = 10.0  # seconds that ranks have to end at once
LOOPBACK = ("lo", "lo0")  # how Linux and macOS name it


@dataclass(frozen=True)
class RankContext:
    """Where one rank stands.

    Attributes:
        rank: this process among all, 0 to size - 1.
        size: number of processes.
        device: the device that this rank computes on.
    """

    rank: int
    size: int
    device: torch.device

    @property
    def leads(self) -> bool:
        """Whether this is the rank that prints and writes for all."""
        return self.rank == 0

    @classmethod
    def join(cls, device: str = "auto") -> RankContext:
        """This process in the default process group, which is made where there is none: of the ranks that the launcher
        started (collective over them), or of this one alone.

        Args:
            device: a type of device, or "auto" for cuda where there is one. Where the group exists, the program has
                chosen among those of the machine: this rank has torch's current one.

        Raises:
            ConfigValueError: this machine has no such device.
        """
        if not dist.is_initialized():
            _init(_context(Placement.of(None if under_launcher() else 1, device).device_type))
            atexit.register(lambda: dist.is_initialized() and dist.destroy_process_group())
        kind = device_type_of(device)
        own = torch.device("cpu")
        if kind != "cpu":
            own = torch.device(kind, torch.get_device_module(kind).current_device())
        return cls(dist.get_rank(), dist.get_world_size(), own)


@dataclass(frozen=True)
class Placement:
    """How many ranks there will be in total, on which type of device."""

    ranks: int
    device_type: str

    @classmethod
    def of(cls, ranks: int | None = None, device: str = "auto") -> Placement:
        """What was asked for, or else what the environment offers: the launcher's ranks, or one per device, or
        `RANKS_ON_CPU`.

        Raises:
            ConfigValueError: this machine, or the world that was given, cannot provide it.
        """
        device_type = device_type_of(device)
        devices = _device_count(device_type)
        if under_launcher():
            given = int(os.environ["WORLD_SIZE"])
            if ranks not in (None, given):
                raise ConfigValueError(
                    f"ranks: the launcher started {given} ranks, not {ranks}; leave ranks out under a launcher"
                )
            ranks, here = given, int(os.environ.get("LOCAL_WORLD_SIZE", given))
        else:
            ranks = here = ranks or (RANKS_ON_CPU if device_type == "cpu" else devices)
        if device_type != "cpu" and here > devices:
            raise ConfigValueError(
                f"ranks: {here} ranks on this machine, but {devices} {device_type} devices. Start at most one rank per "
                "device, or pass device='cpu'"
            )
        return cls(ranks, device_type)


def device_type_of(device: str) -> str:
    """`device` itself, or for "auto" cuda where there is one, and the CPU elsewhere.

    Raises:
        ConfigValueError: torch cannot use such a device here.
    """
    device_type = ("cuda" if _device_count("cuda") else "cpu") if device == "auto" else device
    if not _device_count(device_type):
        raise ConfigValueError(f"device: this machine has no {device_type!r} device that torch can use")
    return device_type


def under_launcher() -> bool:
    """Whether torchrun, or a launcher with its environment variables, started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def run(job: Callable[..., int], placement: Placement, *arguments: Any) -> int:
    """Run `job` on every rank of `placement`; returns when those that this process is responsible for are done.

    SIGINT, SIGTERM and SIGUSR1 go on to the ranks that were spawned, which may end in their own time
    ([Note: stopping]); the second one ends them at once. They do not outlive this process.

    Args:
        job: what a rank does, `job(world, *arguments)`; it returns an exit code. All of it can be pickled.

    Returns:
        The highest exit code of the ranks in this process' care; 128 and its number if a signal stopped them.

    Raises:
        torch.multiprocessing.ProcessRaisedException, ProcessExitedException: a spawned rank failed, or was killed.
    """
    if under_launcher():
        return _run_rank(job, placement, arguments)
    store = _store_on_loopback()
    context = mp.get_context("spawn")
    code, stop = context.Value("i", 0), context.Value("i", 0, lock=False)
    shared = (store.port, code, stop, job, placement, arguments)
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)  # that the others end, too, is no news
    with _signals_forwarded(stop) as started:
        # Processes do not get SIGINT while they import; for this one it waits.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            ranks = mp.spawn(_spawned, args=shared, nprocs=placement.ranks, join=False)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        try:
            started(ranks.processes)
            while not ranks.join():
                pass
        except mp.ProcessExitedException:
            if not stop.value:
                raise
            print_line(f"stopped by {in_words(stop.value)} while no step was running: there is nothing more to save")
        finally:
            _end(ranks.processes)  # after an exception that reached only this process they would train on
    return 128 + stop.value if stop.value else int(code.value)


def _end(processes: Sequence[Any]) -> None:
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + PATIENCE
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        process.kill()  # nothing where it has ended


@contextmanager
def _signals_forwarded(stop: Any) -> Iterator[Callable[[Sequence[Any]], None]]:
    """A context in which the first signal that comes to this process is forwarded to the ranks that it has started, and
    its number is in `stop`, which they share ([Note: stopping]). What it gives is to be called with their processes."""
    ranks: list[Any] = []
    came: dict[int, float] = {}

    def forward() -> None:
        for process in ranks:
            process.terminate()  # SIGTERM: SIGINT they leave to this process, see `_spawned`

    def note(number: int, frame: FrameType | None) -> None:
        if not is_first(signal.SIGTERM, came):  # of whatever kind: one is forwarded
            raise KeyboardInterrupt
        if not stop.value:
            stop.value = number
            forward()

    def started(processes: Sequence[Any]) -> None:
        ranks.extend(processes)
        if stop.value:
            forward()

    with handled_by(note):
        yield started


def _spawned(
    rank: int,
    port: int,
    code: Any,
    stop: Any,
    job: Callable[..., int],
    placement: Placement,
    arguments: tuple[Any, ...],
) -> None:
    # A terminal's ^C reaches the whole process group: the parent forwards its own to the ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    meant_by(stop)
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    ranks = str(placement.ranks)
    # What torchrun would have set: hybrid strategies read which ranks share a node, logs read the rank.
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=ranks, LOCAL_WORLD_SIZE=ranks)
    if placement.device_type == "cpu":
        torch.set_num_threads(max(1, _cores() // placement.ranks))
    _stay_on_loopback()
    mine = _run_rank(job, placement, arguments, dist.TCPStore("127.0.0.1", port, is_master=False))
    with code.get_lock():
        code.value = max(code.value, mine)


def _store_on_loopback() -> dist.TCPStore:
    """The store of ranks on this machine, kept by their parent: its port is taken before any of them starts, so none
    can be lost to another program. A store that opens its own socket listens on all interfaces."""
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    return dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())


def _stay_on_loopback() -> None:
    """Let the backends of this process, whose peers are all on this machine, listen on its loopback interface only:
    who reaches their ports takes part. What the environment names may be a network's."""
    for _, name in socket.if_nameindex():
        if name in LOOPBACK:
            os.environ.update(GLOO_SOCKET_IFNAME=name, NCCL_SOCKET_IFNAME=name)


def _end_with_the_parent() -> None:
    """Else ranks whose parent was killed would train on unseen, into the folder of the run that goes on from there."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _run_rank(
    job: Callable[..., int], placement: Placement, arguments: tuple[Any, ...], store: dist.Store | None = None
) -> int:
    context = _context(placement.device_type)
    _init(context, store)
    try:
        return job(context, *arguments)
    finally:
        dist.destroy_process_group()


def _context(device_type: str) -> RankContext:
    """Where this process stands by its environment, which is that of torchrun or empty."""
    rank = int(os.environ.get("RANK", 0))
    local = int(os.environ.get("LOCAL_RANK", rank))
    device = torch.device("cpu") if device_type == "cpu" else torch.device(device_type, local)
    return RankContext(rank, int(os.environ.get("WORLD_SIZE", 1)), device)


def _init(context: RankContext, store: dist.Store | None = None) -> None:
    device = context.device
    if device.type == "cpu":
        retain_host_memory()
    else:
        torch.get_device_module(device).set_device(device)
    with nullcontext(store) if store is not None else store_of_this_start() as own:
        dist.init_process_group(
            dist.get_default_backend_for_device(device.type),
            store=own if under_launcher() else dist.HashStore(),
            rank=context.rank,
            world_size=context.size,
            device_id=None if device.type == "cpu" else device,
        )


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
