"""The interpreter's end waits for gloo's worker threads that are at work, and for no other thread."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from flatfsdp.engine.cpu import gloo
from tests.harness import commands

pytestmark = [
    pytest.mark.unit,
    pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are listed on Linux only"),
]


class Worker(threading.Thread):
    """A thread of that name, which does one thing."""

    def __init__(self, work: Callable[[], object]) -> None:
        super().__init__()
        self.began, self.ended_at, self._work = threading.Event(), 0.0, work

    def run(self) -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(gloo.WORKER)
        self.began.set()
        self._work()
        self.ended_at = time.monotonic()


def test_a_worker_at_work_is_waited_for() -> None:
    # Without the interpreter's lock, and in one thread: one of torch's sleeps while others of its threads compute.
    worker = Worker(lambda: hashlib.pbkdf2_hmac("sha256", b"", b"", 1_000_000))
    worker.start()
    worker.began.wait(30)
    time.sleep(0.05)
    gloo.wait_for_workers(60)
    returned_at = time.monotonic()
    worker.join(60)
    assert returned_at > worker.ended_at - 0.2


def test_an_idle_one_is_not() -> None:
    leave = threading.Event()
    worker = Worker(leave.wait)
    worker.start()
    worker.began.wait(30)
    began_at = time.monotonic()
    gloo.wait_for_workers(60)
    assert time.monotonic() - began_at < 30
    leave.set()
    worker.join(60)


def test_it_happens_once_when_the_interpreter_ends(tmp_path: Path) -> None:
    code = """
import torch, torch.distributed as dist
from flatfsdp.engine.comm import transport as comm
from flatfsdp.engine.cpu import gloo
from tests.harness import commands
from flatfsdp.engine.device.streams import Device
from flatfsdp.engine.device.memory import MemoryTracker
from flatfsdp.engine.wrapping.exchanges import EXCHANGES
gloo.wait_for_workers = lambda: print("waited")
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
group = comm.Axis.of(dist.group.WORLD, torch.device("cpu"))
for _ in range(2):
    EXCHANGES.transport(group, Device(torch.device("cpu")), comm_stats=comm.CommStats(), tracker=MemoryTracker())
"""
    (tmp_path / "program.py").write_text(code)
    done = commands.run("program.py", folder=tmp_path, environment=os.environ)
    assert done.stdout == "waited\n", done.stderr
