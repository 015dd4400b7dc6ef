"""Ranks: spawn them on this machine, or join those that a launcher started.

`run` calls a job, `job(world, *arguments)`, once on every rank, inside a process group, in either case.
`RankContext.join` is for programs started by a launcher, or directly: one process is a world of one rank, in the same
way.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
import pickle
import re
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from multiprocessing import connection
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from flatfsdp import retain_host_memory
from flatfsdp.elastic import has_begun, start
from flatfsdp.errors import ConfigValueError
from flatfsdp.trainer.preemption import handled_by, in_words, is_first, meant_by, state_of
from flatfsdp.trainer.rendezvous import store_of_this_start
from flatfsdp.trainer.terminal import print_line

RANKS_ON_CPU = 2
PATIENCE = 10.0  # seconds that ranks have to end when asked to
LOOPBACK = ("lo", "lo0")  # the names on Linux and macOS


@dataclass(frozen=True)
class RankContext:
    """The position of one rank in its job.

    Attributes:
        rank: this process among all, 0 to size - 1.
        size: number of processes.
        device: the device that this rank computes on.
        joins: whether this process is alone yet, and joins the ranks of a job that runs (`flatfsdp.elastic.start`).
    """

    rank: int
    size: int
    device: torch.device
    joins: bool = False

    @property
    def leads(self) -> bool:
        """Whether this rank prints and writes for all."""
        return self.rank == 0 and not self.joins

    @classmethod
    def join(cls, device: str = "auto", *, outlives: bool = False) -> RankContext:
        """Join the default process group. It is made if it does not exist: of the ranks that the launcher started
        (collective over them), or of this process alone.

        Args:
            device: a type of device, or "auto" for cuda if available. Where the group already exists, the program has
                chosen among the devices of the machine: this rank uses torch's current one.
            outlives: whether these ranks go on when others are lost, so that processes may come later and join them.

        Raises:
            ConfigValueError: this machine has no such device.
        """
        if not dist.is_initialized():
            _init(_context(Placement.of(None if under_launcher() else 1, device).device_type), outlives=outlives)
            atexit.register(lambda: dist.is_initialized() and dist.destroy_process_group())
        kind = device_type_of(device)
        own = torch.device("cpu")
        if kind != "cpu":
            own = torch.device(kind, torch.get_device_module(kind).current_device())
        return cls(dist.get_rank(), dist.get_world_size(), own, dist.group.WORLD in _alone)


_alone: weakref.WeakSet[Any] = weakref.WeakSet()  # the default process group of a process that joins, until it has


@dataclass(frozen=True)
class Placement:
    """The total number of ranks, and their type of device."""

    ranks: int
    device_type: str

    @classmethod
    def of(cls, ranks: int | None = None, device: str = "auto") -> Placement:
        """The requested placement, or by default that of the environment: the launcher's ranks, or one per device, or
        `RANKS_ON_CPU`.

        Raises:
            ConfigValueError: this machine, or the launcher's world, cannot provide it.
        """
        device_type = device_type_of(device)
        devices = _device_count(device_type)
        if under_launcher():
            given = int(os.environ["WORLD_SIZE"])
            if ranks not in (None, given):
                raise ConfigValueError(
                    f"ranks: the launcher started {given} ranks, not {ranks}; leave out ranks= under a launcher"
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
    """`device` itself, or for "auto" cuda if available, and otherwise the CPU.

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


def run(
    job: Callable[..., int], placement: Placement, *arguments: Any, outlives: bool = False, restarts: int = 0
) -> int:
    """Run `job` on every rank of `placement`; returns when the ranks that this process is responsible for are done.

    SIGINT, SIGTERM and SIGUSR1 are forwarded to the spawned ranks, which may take their time to end
    ([Note: stopping]); a second signal ends them at once. They do not outlive this process.

    Args:
        job: the function that a rank runs, `job(world, *arguments)`; it returns an exit code. All can be pickled.
        outlives: whether spawned ranks go on by themselves when others are lost (`flatfsdp.elastic.survive`): those
            that are lost are reported, and an error only if no rank comes to its end.
        restarts: how many of these are started again, all together, to join the others.

    Returns:
        The highest exit code of these ranks; 128 plus its number if a signal stopped them.

    Raises:
        torch.multiprocessing.ProcessRaisedException: a spawned rank failed: the first whose exception is its own, if
            there is one.
        torch.multiprocessing.ProcessExitedException: a spawned rank was killed.
    """
    if under_launcher():
        return _run_rank(job, placement, arguments, outlives=outlives)
    store = _store_on_loopback()
    context = mp.get_context("spawn")
    code, stop = context.Value("i", 0), context.Value("i", 0, lock=False)
    shared = (store.port, code, stop, job, placement, arguments, outlives)
    processes: list[Any] = []
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)  # hides that the other ranks end, too
    with signals_forwarded(stop) as started:

        def spawn(first: int, count: int) -> Any:
            # New processes ignore SIGINT while they import; for this process it stays pending.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                made = mp.spawn(_spawned, args=(first, *shared), nprocs=count, join=False)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
            processes.extend(made.processes)
            started(made.processes)
            return made

        def again(rank: int) -> _Process | None:
            nonlocal restarts
            if not restarts or stop.value or not has_begun(store):
                return None
            restarts -= 1
            made = spawn(rank, 1)
            print_line(f"rank {rank} is started again (process {made.pids()[0]}), to join the others")
            return _Process(rank, made.processes[0], made.error_files[0])

        try:
            ranks = spawn(0, placement.ranks)
            if not outlives or not outlive(ranks, again):
                _join(ranks)
        except mp.ProcessExitedException:
            if not stop.value:
                raise
            print_line(f"stopped by {in_words(stop.value)} while no step was running: there is nothing more to save")
        finally:
            _end(processes)  # after an exception in this process only, they would continue to train
    return 128 + stop.value if stop.value else int(code.value)


class _Process(NamedTuple):
    """A process that runs as a rank, and the file with its traceback."""

    rank: int
    process: Any
    report: str


def outlive(ranks: Any, again: Callable[[int], _Process | None]) -> bool:
    """Wait until all have ended, and report each that was lost, and start it `again`, if that returns a process, unless
    the job is lost or has refused it. Returns whether any has come to its end."""
    print_line(f"processes of the ranks: {' '.join(map(str, ranks.pids()))}")
    both = zip(ranks.processes, ranks.error_files, strict=True)
    running = {process.sentinel: _Process(rank, process, file) for rank, (process, file) in enumerate(both)}
    ended_well = False
    while running:
        for sentinel in connection.wait([*running], timeout=1.0 if ended_well else None):
            rank, process, file = running.pop(sentinel)
            process.join()
            if not process.exitcode:
                ended_well = True
                continue
            code = process.exitcode
            how = f"exit code {code}" if code > 0 else signal.Signals(-code).name
            report = _read_report(file).strip()
            hopeless = _HOPELESS.search(report.rpartition(_HEADER)[2])  # the last exception, not what it came from
            if found := _OF_ANOTHER.search(report):
                report = found[0]
            print_line("\n".join([f"rank {rank} (process {process.pid}) has ended: {how}", *filter(None, [report])]))
            if running and not (ended_well or hopeless) and (made := again(rank)) is not None:
                running[made.process.sentinel] = made
        for rank, process, _ in running.values() if ended_well else ():
            if state_of(process.pid) == "T":
                print_line(f"rank {rank} (process {process.pid}) is stopped, and the run has ended without it: killed")
                process.kill()
    return ended_well


def _join(ranks: Any) -> None:
    """Wait until all have ended. After an exception on one of them, the others have some time to end by their own: the
    first to end may only report the failure of another."""
    while True:
        connection.wait([*ranks.sentinels])
        was_killed = any(process.exitcode is not None and process.exitcode < 0 for process in ranks.processes)
        try:
            if ranks.join(grace_period=None if was_killed else PATIENCE):
                return
        except mp.ProcessRaisedException as error:
            reports = {rank: found for rank, file in enumerate(ranks.error_files) if (found := _read_report(file))}
            own = [rank for rank, report in reports.items() if not _OF_ANOTHER.search(report)]
            if not own or own[0] == error.error_index:
                raise
            report = f"\n\n-- Process {own[0]} terminated with the following error:\n{reports[own[0]]}"
            raise mp.ProcessRaisedException(report, own[0], ranks.processes[own[0]].pid) from None


def _read_report(file: str) -> str:
    """The traceback that a rank has left for its parent; "" for none."""
    with suppress(OSError):
        return str(pickle.loads(Path(file).read_bytes()))
    return ""


# The last lines of the traceback of a rank that failed with another, or came too late to join.
_OF_ANOTHER = re.compile(
    r"^flatfsdp\.errors\.((Agreement|LostRank)Error: |UsageError: cannot join).*\Z", re.MULTILINE | re.DOTALL
)


_HEADER = "Traceback (most recent call last):\n"
# The last exception of a rank that another in its place would end with, too: the job is lost, or refuses it.
_HOPELESS = re.compile(r"^flatfsdp\.errors\.(LostRankError: |UsageError: cannot join)", re.MULTILINE)


def _end(processes: Sequence[Any]) -> None:
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + PATIENCE
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        process.kill()  # no effect where it has ended


@contextmanager
def signals_forwarded(stop: Any) -> Iterator[Callable[[Sequence[Any]], None]]:
    """A context that forwards the first signal of this process to the ranks that it has started, and stores its number
    in `stop`, which they share ([Note: stopping]). It yields a function, to be called with their processes."""
    ranks: list[Any] = []
    came: dict[int, float] = {}

    def forward(to: Sequence[Any]) -> None:
        for process in to:
            process.terminate()  # SIGTERM: they ignore SIGINT, see `_spawned`

    def note(number: int, frame: FrameType | None) -> None:
        if not is_first(signal.SIGTERM, came):  # of any kind: only one is forwarded
            raise KeyboardInterrupt
        if not stop.value:
            stop.value = number
            forward(ranks)

    def started(processes: Sequence[Any]) -> None:
        ranks.extend(processes)
        if stop.value:
            forward(processes)  # to the others a second signal means to end at once

    with handled_by(note):
        yield started


def _spawned(
    place: int,
    first: int,
    port: int,
    code: Any,
    stop: Any,
    job: Callable[..., int],
    placement: Placement,
    arguments: tuple[Any, ...],
    outlives: bool,
) -> None:
    # A terminal's ^C reaches the whole process group: the parent forwards its own to the ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    meant_by(stop)
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    rank, ranks = first + place, str(placement.ranks)
    # The variables of torchrun: hybrid strategies read which ranks share a node, logs read the rank.
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=ranks, LOCAL_WORLD_SIZE=ranks)
    if placement.device_type == "cpu":
        torch.set_num_threads(max(1, _cores() // placement.ranks))
    _stay_on_loopback()
    mine = _run_rank(job, placement, arguments, dist.TCPStore("127.0.0.1", port, is_master=False), outlives=outlives)
    with code.get_lock():
        code.value = max(code.value, mine)


def _store_on_loopback() -> dist.TCPStore:
    """The store of ranks on this machine, kept by their parent: its port is bound before any of them starts, so no
    other program can take it. A store that opens its own socket would listen on all interfaces."""
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    return dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())


def _stay_on_loopback() -> None:
    """Let the backends of this process, whose peers are all on this machine, listen only on its loopback interface: any
    program that reaches their ports can take part. An interface named by the environment may be a network's."""
    for _, name in socket.if_nameindex():
        if name in LOOPBACK:
            os.environ.update(GLOO_SOCKET_IFNAME=name, NCCL_SOCKET_IFNAME=name)


def _end_with_the_parent() -> None:
    """End with the parent: ranks of a killed parent would otherwise train on, in the folder of the run that resumes."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _run_rank(
    job: Callable[..., int],
    placement: Placement,
    arguments: tuple[Any, ...],
    store: dist.Store | None = None,
    *,
    outlives: bool = False,
) -> int:
    context = _context(placement.device_type)
    if _init(context, store, outlives=outlives):
        context = replace(context, rank=0, size=1, joins=True)
    try:
        return job(context, *arguments)
    finally:
        dist.destroy_process_group()


def _context(device_type: str) -> RankContext:
    """The context of this process from its environment, which is that of torchrun or empty."""
    rank = int(os.environ.get("RANK", 0))
    local = int(os.environ.get("LOCAL_RANK", rank))
    device = torch.device("cpu") if device_type == "cpu" else torch.device(device_type, local)
    return RankContext(rank, int(os.environ.get("WORLD_SIZE", 1)), device)


def _init(context: RankContext, store: dist.Store | None = None, *, outlives: bool = False) -> bool:
    """Make the default process group; returns whether it is of this process alone, which joins others later."""
    device = context.device
    if device.type == "cpu":
        retain_host_memory()
    else:
        torch.get_device_module(device).set_device(device)
    backend = dist.get_default_backend_for_device(device.type)
    if outlives and under_launcher():
        joins = start(backend, store=store, rank=context.rank, world_size=context.size)
        _alone.update([dist.group.WORLD] if joins else [])
        return joins
    with nullcontext(store) if store is not None else store_of_this_start() as own:
        dist.init_process_group(
            backend,
            store=own if under_launcher() else dist.HashStore(),
            rank=context.rank,
            world_size=context.size,
            device_id=None if device.type == "cpu" else device,
        )
    return False


def _device_count(device_type: str) -> int:
    """The number of devices of a type that torch can use here; 1 for the CPU, 0 for a type unknown to torch."""
    if device_type == "cpu":
        return 1
    try:
        module = torch.get_device_module(device_type)
    except (RuntimeError, AttributeError):
        return 0
    return int(module.device_count()) if module.is_available() else 0


def _cores() -> int:
    """The number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
