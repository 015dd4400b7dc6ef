"""Two jobs that save to one path: the owner of the lock, a stale lock, and the report of the other job.

Machines, their processes and their clocks are doubles here; the real ones have a test at the end.
"""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flatfsdp import checkpoint
from flatfsdp.checkpoint import lock
from flatfsdp.checkpoint.disk import Disk, through
from flatfsdp.checkpoint.lock import PATIENCE, Lock, LockOwner, Machine, locked
from flatfsdp.engine.base.processes import ProcessIdentity, start_of
from flatfsdp.errors import CheckpointError
from flatfsdp.trainer.state.checkpoints import CheckpointManager

pytestmark = pytest.mark.unit


class Other(Machine):
    """A process of a machine: its `processes` with their starts, and a clock that only waiting moves."""

    def __init__(self, pid: int = 7, boot: str = "b1", host: str = "node", processes: dict[int, str] | None = None):
        self.processes = {pid: "100"} if processes is None else processes
        self.process = ProcessIdentity(host, boot, pid, self.processes.get(pid, ""))
        self.clock = 0.0
        self.while_waiting: Callable[[], object] = lambda: None

    def now(self) -> float:
        return self.clock

    def wait(self, seconds: float) -> None:
        self.clock += seconds
        self.while_waiting()

    def start_of(self, pid: int) -> str | None:
        return self.processes.get(pid)


def left_by(path: Path, machine: Machine, token: str = "f00d") -> Path:
    """The lock of a process that did not give it back."""
    holder = LockOwner(machine.process, "train.py", token)
    file = path.with_name(f".{path.name}.lock")
    file.write_bytes(holder.to_bytes())
    return file


@pytest.fixture(autouse=True)
def unseen(monkeypatch: Any) -> None:
    monkeypatch.setattr(lock, "_seen", {})


def waited(path: Path, machine: Other) -> float:
    """Seconds until the lock was taken, by the clock of `machine`."""
    mine = Lock(path, machine)
    mine.take()
    mine.check()
    mine.release()
    assert not list(path.parent.glob(".*")), "nothing is left"
    return machine.clock


# --- stale ------------------------------------------------------------------------------------------------------------


def test_a_process_of_this_machine_that_is_gone_holds_up_nobody(tmp_path: Path) -> None:
    path = tmp_path / "x"
    left_by(path, Other(pid=9))
    assert waited(path, Other()) == 0.0
    left_by(path, Other(pid=9))  # a later process has its number
    assert waited(path, Other(processes={7: "100", 9: "200"})) == 0.0
    left_by(path, Other(pid=7))  # and so has this one
    assert waited(path, Other(processes={7: "200"})) == 0.0
    left_by(path, Other())  # of this very process, which did not release it
    assert waited(path, Other()) == 0.0


def test_a_process_of_this_machine_that_runs_has_its_lock_however_still_it_stands(tmp_path: Path) -> None:
    file = left_by(tmp_path / "x", Other(pid=9))
    machine = Other(processes={7: "100", 9: "100"})
    with pytest.raises(CheckpointError, match=r"^process 9 on node \(train\.py\) is saving to .*/x right now"):
        Lock(tmp_path / "x", machine).take()
    assert machine.clock == 0.0 and file.exists()


@pytest.mark.parametrize(
    ("holder", "seer"),
    [
        (Other(host="far", boot="b2"), Other()),
        (Other(boot="b2"), Other()),  # another machine, or another container, of the same name
        (Other(boot=""), Other()),
        (Other(), Other(boot="")),
        (Other(boot="", processes={}), Other(boot="", pid=9)),
        (Other(pid=9, processes={9: ""}), Other(processes={7: "100", 9: ""})),  # whose processes are not shown
    ],
    ids=["machine", "container", "unknown there", "unknown here", "unknown", "hidden"],
)
def test_elsewhere_a_lock_is_stale_when_its_number_stands_still(tmp_path: Path, holder: Other, seer: Other) -> None:
    path = tmp_path / "x"
    seer.clock, seer.while_waiting = 0.0, lambda: None
    left_by(path, holder)
    assert PATIENCE <= waited(path, seer) < PATIENCE + 2.0
    file = left_by(path, holder)
    number = [0]

    def count() -> None:
        number[0] += 1
        if number[0] == 5:
            with file.open("ab") as opened:
                opened.write(b"%012d\n" % 1)

    seer.clock, seer.while_waiting = 0.0, count
    with pytest.raises(CheckpointError, match=r"^process \d+ on \w+ \(train\.py\) is saving to"):
        Lock(path, seer).take()
    assert seer.clock < 5.0 and file.exists()


def test_who_does_not_wait_knows_from_its_looks_before(tmp_path: Path) -> None:
    file, seer = left_by(tmp_path / "x", Other(boot="b2")), Other()
    for _ in range(2):
        assert not Lock(tmp_path / "x", seer).take_now()
        seer.clock += PATIENCE - 1.0
        file.write_bytes(file.read_bytes() + b"1")  # it moves
    assert not Lock(tmp_path / "x", seer).take_now()
    seer.clock += PATIENCE
    mine = Lock(tmp_path / "x", seer)
    assert mine.take_now()
    mine.release()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("data", [b"", b"{}", b"[" * 5000, b"\xff\x00", b'{"pid": -1}', os.urandom(9000)])
def test_a_lock_without_content_is_stale_when_it_stands_still(tmp_path: Path, data: bytes) -> None:
    (tmp_path / ".x.lock").write_bytes(data)
    assert 0.0 < waited(tmp_path / "x", Other()) < PATIENCE + 2.0


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("nowhere")])
def test_what_is_no_lock_is_reported_at_once(tmp_path: Path, make: Callable[[Path], object]) -> None:
    make(tmp_path / ".x.lock")
    with pytest.raises(CheckpointError, match=r"\.x\.lock"):
        checkpoint.save(tmp_path / "x", extra={"a": 1})
    assert os.path.lexists(tmp_path / ".x.lock")


# --- races ------------------------------------------------------------------------------------------------------------


class Meddling(Disk):
    """Calls a function ahead of the first operation of a kind, on files of a suffix."""

    def __init__(self, operation: str, meddle: Callable[[], object], suffix: str = "") -> None:
        self.operation, self.meddle, self.suffix = operation, meddle, suffix

    def before(self, operation: str, path: Path, size: int) -> None:
        if operation == self.operation and path.suffix.endswith(self.suffix):
            self.operation = ""
            self.meddle()


def test_of_two_who_remove_a_stale_lock_at_once_one_has_it(tmp_path: Path) -> None:
    path = tmp_path / "x"
    left_by(path, Other(pid=9))
    first, second = Lock(path, Other()), Lock(path, Other(pid=8, processes={7: "100", 8: "100"}))
    meddling = Meddling("rename", first.take)  # between the other's look and its removal
    with through(meddling), pytest.raises(CheckpointError, match=r"process 7 on node"):
        second.take()
    first.check()
    first.release()
    assert not list(tmp_path.iterdir())


def test_who_was_stopped_for_long_finds_its_lock_lost(tmp_path: Path) -> None:
    path, stopped, other = tmp_path / "x", Lock(tmp_path / "x", Other()), Lock(tmp_path / "x", Other(boot="b2"))
    stopped.take()
    other.take()
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"the lock of this save, \.x\.lock, is lost: .* save again"):
            stopped.check()
        stopped.release()
    other.check()
    other.release()
    assert not list(tmp_path.iterdir()) and not path.exists()


def test_many_threads_have_it_one_at_a_time(tmp_path: Path) -> None:
    gone = LockOwner(ProcessIdentity.this()._replace(pid=2**22 + 1), "", "f00d")
    (tmp_path / ".x.lock").write_bytes(gone.to_bytes())
    inside: list[int] = []
    most: list[int] = []
    refused: list[str] = []
    machine = Machine()

    def work(number: int) -> None:
        for _ in range(20):
            mine = Lock(tmp_path / "x", machine)
            try:
                mine.take()
            except CheckpointError as error:
                refused.append(str(error))
                continue
            inside.append(number)
            most.append(len(inside))
            mine.check()
            inside.remove(number)
            mine.release()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert set(most) == {1} and len(most) + len(refused) == 80
    assert not list(tmp_path.iterdir())


def test_the_number_is_counted_up_while_a_lock_is_had(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(lock, "BEAT", 0.01)
    mine = Lock(tmp_path / "x")
    mine.take()
    data = mine.file.read_bytes()
    for _ in range(1000):
        if mine.file.read_bytes() not in (data, b""):
            break
        threading.Event().wait(0.01)
    assert mine.file.read_bytes().startswith(data) and mine.file.read_bytes() != data
    mine.check()
    mine.release()
    assert not mine.file.exists()


# --- the next owner ---------------------------------------------------------------------------------------------------


def save(path: Path, **kwargs: Any) -> None:
    checkpoint.save(path, extra={"a": 1}, **kwargs)


def test_saves_exports_and_removals_leave_what_another_job_writes(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path / f"step-{step}")
    (tmp_path / ".step-4.new").mkdir()
    left = (tmp_path / ".step-5.new", tmp_path / ".step-6.lock")
    left[0].mkdir()
    left_by(tmp_path / "step-6", Other())
    keeping = checkpoint.Keeping(last=1, unfinished=True)
    with locked(tmp_path / "step-1", tmp_path / "step-4", tmp_path / "e"):
        with pytest.raises(CheckpointError, match=r"step-4: process \d+ on .* is saving to .*/step-4 right now"):
            save(tmp_path / "step-4", overwrite=True, keeping=keeping)
        with pytest.raises(CheckpointError, match=r"/e: process \d+ on .* is saving to .*/e right now"):
            checkpoint.export_safetensors(torch.nn.Linear(1, 1), tmp_path / "e")
        save(tmp_path / "step-7", keeping=keeping)
        assert {each.name for each in tmp_path.iterdir()} >= {"step-1", ".step-4.new", "step-7", ".step-1.lock"}
        assert not any((tmp_path / name).exists() for name in ("step-2", "step-3", ".step-5.new"))
    left[1].unlink()  # of another machine
    save(tmp_path / "step-8", keeping=keeping)
    assert {each.name for each in tmp_path.iterdir()} == {"step-8"}


def test_a_run_sets_nothing_aside_that_another_job_writes(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path / f"step-{step:08}")
    run = CheckpointManager(tmp_path, asynchronous=False)
    with (
        locked(tmp_path / "step-00000003"),
        pytest.raises(CheckpointError, match=r"saving to .*/step-00000003 right now"),
    ):
        run.set_aside(tmp_path / "step-00000001")
    assert {each.name for each in tmp_path.iterdir()} == {f"step-{step:08}" for step in (1, 2, 3)}


def test_a_save_that_has_lost_its_lock_replaces_nothing(tmp_path: Path) -> None:
    save(tmp_path / "x")

    def steal() -> None:
        (tmp_path / ".x.lock").unlink()
        left_by(tmp_path / "x", Other())

    for suffix in (".safetensors", ".distcp"):
        with through(Meddling("write", steal, suffix)), pytest.raises(CheckpointError, match=r"\.x\.lock, is lost"):
            checkpoint.save(
                tmp_path / "x",
                model={"w": torch.ones(2)},
                extra={"a": 2},
                overwrite=True,
                model_format="safetensors" if suffix == ".safetensors" else "flatfsdp",
            )
        assert checkpoint.load(tmp_path / "x") == {"a": 1}
        (tmp_path / ".x.lock").unlink()


def test_a_reader_gets_an_error_when_what_it_reads_is_replaced(tmp_path: Path) -> None:
    def state(number: float) -> dict[str, torch.Tensor]:
        return {"v": torch.full((50,), number), "w": torch.full((50,), number)}

    checkpoint.save(tmp_path / "x", model=state(1.0))
    by_another = Meddling(
        "read", lambda: checkpoint.save(tmp_path / "x", model=state(2.0), overwrite=True), suffix=".distcp"
    )
    with through(by_another), pytest.raises(CheckpointError, match="was replaced by another save while it was read"):
        checkpoint.load(tmp_path / "x", model=state(0.0), verify=False)


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes anywhere")
def test_where_nobody_may_write_the_error_is_that_of_the_save(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(CheckpointError, match=r"PermissionError: \[Errno 13\]"):
        save(tmp_path / "x")


# --- real processes ---------------------------------------------------------------------------------------------------


def test_a_lock_is_had_until_its_process_is_killed_and_not_longer(tmp_path: Path) -> None:
    process = subprocess.Popen(["sleep", "60"])
    try:
        machine = Machine()
        start = start_of(process.pid)
        assert start, "Linux tells when a process began"
        holder = LockOwner(machine.process._replace(pid=process.pid, start=start), "", "f00d")
        (tmp_path / ".x.lock").write_bytes(holder.to_bytes())
        with pytest.raises(CheckpointError, match=rf"process {process.pid} on .* is saving to "):
            save(tmp_path / "x")
    finally:
        process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # a zombie: its exit status has not been read yet
    machine.wait = lambda seconds: pytest.fail("waited")  # type: ignore[method-assign]
    mine = Lock(tmp_path / "x", machine)
    mine.take()
    mine.release()
    process.wait(60)
    (tmp_path / ".x.lock").write_bytes(holder.to_bytes())
    save(tmp_path / "x")
    assert {each.name for each in tmp_path.iterdir()} == {"x"}
