"""Starting ranks: processes that find each other like under torchrun.

They are forked from a process that has only imported torch and flatfsdp with its trainer, which saves the seconds of an
import in each. Otherwise they are like newly started processes: they have the current environment of this one, and end
like the interpreter.

The parent hosts the store, and every rank gets the environment variables that torchrun would set, so that
``init_process_group("gloo")`` works in it without arguments. The output of a rank, including crash reports, goes to a
separate file; SIGUSR1 makes it write the Python stacks of all its threads to another.

Values cross process borders as plain pickled bytes: a tensor arrives as a detached copy on the CPU, never as shared
memory.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import io
import itertools
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing import connection, forkserver, popen_forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

import torch
import torch.distributed as dist

# torch.manual_seed() notes the stack of its caller for each kind of device that is not in use yet: a hundredth of the
# ranks' time.
for _devices in (torch.cuda, torch.xpu, torch.mtia):
    _devices.traceback = SimpleNamespace(format_stack=list)  # type: ignore[attr-defined]

STARTUP_TIMEOUT = 120.0  # seconds for importing torch in every rank while other programs have the cores

# Never fork this process: torch's threads do not survive a fork. A process that only imports has none.
_FORKSERVER = multiprocessing.get_context("forkserver")
_PRELOADED = [
    "torch.distributed",
    "torch._dynamo",  # optimizers import it at their first step
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.launcher.api",  # of torchrun
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "torch.testing._internal.distributed.fake_pg",
    "safetensors.torch",
    "flatfsdp.checkpoint",
    "flatfsdp.trainer.demo.options",  # with all that the trainer's command imports, but not as that command
    "flatfsdp.trainer.memory_estimate",
    "tests.harness.parity",
    "pytest",  # imported by test modules
    "tests.harness.dtensor_metas",
    "tests.harness.last_preload",
]


def share_server() -> None:
    """Start the server now, for this process and those that it forks: only this one, its parent, can wait for it."""
    _FORKSERVER.set_forkserver_preload(_PRELOADED)
    forkserver.ensure_running()
    forkserver._forkserver.ensure_running = lambda: None  # type: ignore[attr-defined]


class _Popen(popen_forkserver.Popen):
    """Its exit status can be read only once, and every process started on any thread polls all others: of two threads
    that poll at the same time, one gets the status and the other a closed pipe, which CPython reports as 255."""

    _reading = threading.Lock()

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        if self.returncode is None and flag != os.WNOHANG:
            connection.wait([self.sentinel])  # may take long, and so without the lock
        with self._reading:
            return super().poll(os.WNOHANG)


class _Rank(ForkServerProcess):
    """A forked process that ends like a started one, except for what its server has imported: atexit callbacks run, the
    interpreter's finalization begins, the modules that this process has added are emptied, and its libraries and C++
    objects are finalized."""

    _Popen = staticmethod(_Popen)

    def start(self) -> None:
        _FORKSERVER.set_forkserver_preload(_PRELOADED)  # modules of tools that tests import set another list
        super().start()

    def _bootstrap(self, *args: Any, **more: Any) -> NoReturn:
        gc.freeze()  # the collector then skips all of torch's objects, in particular at the end
        # Handlers run latest first, so all those from before the fork come after this one. That is what takes apart
        # torch's operators, one by one.
        libc = ctypes.CDLL(None)
        if hasattr(libc, "on_exit"):  # glibc's
            libc.on_exit(libc._exit, None)
        before = len(sys.modules)
        code = super()._bootstrap(*args, **more)
        sys.last_value = _End(code, before)  # the first that is deleted
        ctypes.pythonapi.Py_Exit(code)
        raise AssertionError("Py_Exit does not return")


class _End(BaseException):
    """Exits the process once its interpreter's finalization has come to the modules. Emptying those of the server, too,
    would copy all of its pages: most of the CPU time of a short process."""

    def __init__(self, code: int, before: int) -> None:
        self._code, self._before, self._streams = code, before, (sys.stdout, sys.stderr)
        self._exit = ctypes.PyDLL(None).exit  # holds the interpreter's lock, like the rest of a finalization

    def __del__(self) -> None:
        """Called where the interpreter deletes this value from `sys`: daemon threads can run no code from now on."""
        for name in list(itertools.islice(reversed(sys.modules), len(sys.modules) - self._before)):
            module, sys.modules[name] = sys.modules[name], None  # type: ignore[assignment]
            if isinstance(module, ModuleType):
                vars(module).clear()
        gc.collect()
        for stream in self._streams:
            stream.flush()
        self._exit(self._code)


class Ranks:
    """``world`` running processes, each with a pipe to this one. They run ``body(rank, world, pipe)`` in `folder`
    (default: that in which this process is now)."""

    def __init__(
        self, world: int, body: Callable[[int, int, Connection], None], folder: str | os.PathLike[str] | None = None
    ) -> None:
        self.world = world
        self._paused = False
        self._folder = tempfile.TemporaryDirectory(prefix="flatfsdp-ranks-")
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        place = os.path.abspath(folder or ".")
        self.pipes: list[Connection] = []
        self.processes: list[multiprocessing.process.BaseProcess] = []
        for rank in range(world):
            ours, theirs = _FORKSERVER.Pipe()
            arguments = (rank, world, self._store.port, str(self._file(rank)), dict(os.environ), place, theirs, body)
            process = _Rank(target=_rank_main, args=arguments, daemon=True, name=f"rank {rank} of {world}")
            process.start()
            theirs.close()  # so that a dead rank shows as the end of its pipe
            self.pipes.append(ours)
            self.processes.append(process)

    def output(self, rank: int) -> str:
        """The output of ``rank`` to standard output and error so far."""
        file = self._file(rank)
        return file.read_text(errors="replace") if file.exists() else ""  # it may have died before it had one

    def stacks(self, ranks: list[int]) -> dict[int, str]:
        """The Python stack of every thread of these ranks, most recent call first; '' for a rank that has ended."""
        asked = []
        for rank in ranks:
            process = self.processes[rank]
            if process.is_alive() and self._stack_file(rank).exists():
                assert process.pid is not None
                os.kill(process.pid, signal.SIGUSR1)
                asked.append(rank)
        deadline = time.monotonic() + 2
        while time.monotonic() < deadline and not all(self._stack_file(rank).stat().st_size for rank in asked):
            time.sleep(0.01)
        time.sleep(0.1 if asked else 0)  # the file is written line by line
        return {rank: self._stack_file(rank).read_text() if rank in asked else "" for rank in ranks}

    def pause(self) -> None:
        """Stop all ranks, which must `end_with_the_server`. Without effect on those that are stopped."""
        self._signal(signal.SIGSTOP, paused=True)

    def resume(self) -> None:
        """Let them go on."""
        self._signal(signal.SIGCONT, paused=False)

    def _signal(self, number: int, *, paused: bool) -> None:
        if self._paused is not paused:
            self._paused = paused
            for process in self.processes:
                if process.is_alive():
                    assert process.pid is not None
                    os.kill(process.pid, number)

    def kill(self) -> None:
        """Kill all ranks and remove their files. A second call has no effect."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join(60)
        for pipe in self.pipes:
            pipe.close()
        self._folder.cleanup()

    def _file(self, rank: int) -> Path:
        return Path(self._folder.name) / f"rank{rank}.out"

    def _stack_file(self, rank: int) -> Path:
        return self._file(rank).with_suffix(".out.stack")


def end_with_the_server() -> None:
    """Let the server's end, and so that of the run, kill this rank, which does not notice it while it is stopped."""
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))


def dumps(value: object) -> bytes:
    """``value`` as bytes that hold every tensor by value."""
    buffer = io.BytesIO()
    _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            # A copy: a view would include its whole storage.
            return value.detach().cpu().clone().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return NotImplemented


def _rank_main(
    rank: int,
    world: int,
    port: int,
    output: str,
    environment: dict[str, str],
    folder: str,
    pipe: Connection,
    body: Callable[[int, int, Connection], None],
) -> None:
    os.chdir(folder)
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    faulthandler.enable()
    stacks = open(output + ".stack", "w")  # noqa: SIM115 - the signal handler writes to it for the life of the process
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    os.environ.clear()
    os.environ.update(
        environment,
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_WORLD_SIZE=str(world),
        TORCHELASTIC_USE_AGENT_STORE="True",  # the store already exists: rank 0 must not open its own
        GLOO_SOCKET_IFNAME=environment.get("GLOO_SOCKET_IFNAME", "lo"),
    )
    torch.set_num_threads(1)
    try:
        body(rank, world, pipe)
    except BaseException:
        traceback.print_exc()
        raise
