"""Commands of this python, ``-m module ARGUMENTS`` or ``program.py ARGUMENTS``, without a slow interpreter start.

They run in a process that is forked where torch is already imported, and so do the ranks that they spawn, or that
torchrun starts as `python` commands (see `processes`). Their actions, output, folder, environment and exit code are
those of the command. For anything before the import of torch, in a terminal, or for a whole process group, start an
interpreter.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.context
import multiprocessing.forkserver
import multiprocessing.process
import multiprocessing.resource_tracker
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, NoReturn

import torch

from tests.harness.processes import _Rank


class _Printing(_Rank):
    """Prints to files, and has the environment of its starting process: a fork of the server inherits neither."""

    printed: tuple[str, str] = ("", "")  # the files of the command that runs in this process

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.environment, self.files, self.leads = dict(os.environ), self.printed, False

    def _bootstrap(self, *args: Any) -> NoReturn:
        if self.leads:
            os.setsid()
        type(self).printed = self.files
        for descriptor, path in zip((1, 2), self.files, strict=True):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
        os.environ.clear()
        os.environ.update(self.environment)
        super()._bootstrap(*args)


class _Forking(ForkServerContext):
    """The context "spawn" in a command's process."""

    _name = "spawn"
    Process = _Printing


class _Started:
    """A rank of torchrun, with the part of `subprocess.Popen` that torchrun uses."""

    def __init__(
        self, args: tuple[str, ...], env: dict[str, str], stdout: Any, stderr: Any, start_new_session: bool
    ) -> None:
        python, unbuffered, *arguments = args
        assert (python, unbuffered, stdout, stderr) == (sys.executable, "-u", None, None), args
        self._process = _Printing(target=_main, args=(arguments, os.getcwd(), True), name=" ".join(args))
        self._process.environment, self._process.leads = env, start_new_session
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0.0)
        return self._process.exitcode


@dataclass(frozen=True)
class Command:
    """A running command."""

    process: _Printing
    limit: float  # of seconds

    def send_signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def wait(self) -> subprocess.CompletedProcess[str]:
        """Wait for its end. Returned: the output and the exit code.

        Raises:
            TimeoutError: it did not end in time; the message has its output.
        """
        self.process.join(self.limit)
        text, complained = (Path(file).read_text(errors="replace") for file in self.process.files)
        if self.process.exitcode is None:
            raise TimeoutError(
                f"{self.process.name} still runs after {self.limit:g} s. It printed:\n{text}{complained}"
            )
        return subprocess.CompletedProcess(self.process.name, self.process.exitcode, text, complained)


@contextmanager
def started(
    *arguments: object, folder: Path, environment: Mapping[str, str], limit: float = 300.0, cleans_up: bool = True
) -> Iterator[Command]:
    """``python ARGUMENTS`` in `folder`; killed at the end of the context. With ``cleans_up=False``, another process
    removes the semaphores that it leaves when it is killed, as for a started interpreter."""
    texts = [str(each) for each in arguments]
    with tempfile.TemporaryDirectory(prefix="flatfsdp-command-") as printed:
        process = _Printing(target=_main, args=(texts, str(folder), False, cleans_up), name=" ".join(texts))
        process.files = f"{printed}/out", f"{printed}/err"
        process.environment = dict(environment)
        process.start()
        try:
            yield Command(process, limit)
        finally:
            process.kill()
            process.join(60)


def run(
    *arguments: object, folder: Path, environment: Mapping[str, str], limit: float = 300.0
) -> subprocess.CompletedProcess[str]:
    """Run such a command to its end."""
    with started(*arguments, folder=folder, environment=environment, limit=limit) as command:
        return command.wait()


def torchrun(
    ranks: int, *arguments: object, folder: Path, environment: Mapping[str, str], limit: float = 300.0
) -> subprocess.CompletedProcess[str]:
    """Run ``torchrun --standalone --nproc-per-node=RANKS ARGUMENTS`` to its end."""
    launcher = "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"
    return run(*launcher, *arguments, folder=folder, environment=environment, limit=limit)


def _main(arguments: list[str], folder: str, unbuffered: bool = False, cleans_up: bool = True) -> None:
    os.chdir(folder)
    multiprocessing.process.ORIGINAL_DIR = folder  # type: ignore[attr-defined]  # where the ranks that it spawns start
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.path[:0] = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
    multiprocessing.context._concrete_contexts["spawn"] = _Forking()  # type: ignore[attr-defined]
    # Its address is that of the server that forked this process, which runs as long as any of its processes.
    multiprocessing.forkserver._forkserver.ensure_running = lambda: None  # type: ignore[attr-defined]
    if not cleans_up:
        multiprocessing.resource_tracker._resource_tracker._fd = None  # that of the tests
    if "torch.distributed.run" in arguments:
        from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

        subprocess_handler.Popen = _Started  # type: ignore[attr-defined]
    if unbuffered:
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    try:
        if arguments[0] == "-m":
            sys.argv = arguments[1:]
            sys.path.insert(0, folder)
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = arguments
            sys.path.insert(0, str(Path(arguments[0]).parent))
            runpy.run_path(arguments[0], run_name="__main__")
    except Exception:
        sys.excepthook(*sys.exc_info())  # like the interpreter: libraries replace it
        sys.exit(1)
