"""The pool and the fresh processes themselves: results, messages of failures, and a new pool after each failure."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.conftest import Run
from tests.harness import commands, fresh, pool
from tests.harness.fake import fake_world
from tests.harness.memory import Recording, Usage, peak_bytes
from tests.harness.pool import MANY_GROUPS, JobFailed
from tests.harness.processes import _PRELOADED, Ranks

pytestmark = pytest.mark.distributed


def identify(rank: int, world: int, *words: str, **more: int) -> tuple[object, ...]:
    assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (rank, world, "gloo")
    return rank, world, words, more, os.getpid()


def add_up(rank: int, world: int) -> torch.Tensor:
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total)
    return total


def views(rank: int, world: int) -> dict[str, torch.Tensor]:
    big = torch.nn.Parameter(torch.arange(1_000_000.0))
    image = torch.arange(24.0).view(1, 2, 3, 4).to(memory_format=torch.channels_last)
    return {"small": big[rank : rank + 2], "image": image, "empty": torch.empty(0, 3, dtype=torch.int8)}


def settings(rank: int, world: int) -> tuple[object, ...]:
    """The random state, threads and grad mode at the start of a job, which then changes them."""
    found = random.random(), torch.rand(()).item(), torch.get_num_threads(), torch.is_grad_enabled()
    torch.set_num_threads(2)
    torch.set_grad_enabled(False)
    return found


def make_groups(rank: int, world: int, count: int) -> int:
    for _ in range(count):
        dist.new_group([0])
    return os.getpid()


def warned(rank: int, world: int) -> list[type[Warning]]:
    raised = []
    for category in (FutureWarning, DeprecationWarning, UserWarning):
        try:
            warnings.warn_explicit("going away", category, "somewhere.py", 1, module="torch.distributed.somewhere")
        except Warning as warning:
            raised.append(type(warning))
    return raised


def fail_alike(rank: int, world: int) -> None:
    raise ValueError(f"no from rank {rank}")


def fail_alone(rank: int, world: int) -> None:
    if rank == 1:
        raise ValueError("no from rank 1")
    dist.barrier()


def die_alone(rank: int, world: int) -> None:
    if rank == 1:
        print("famous last words", flush=True)
        os._exit(7)
    dist.barrier()


def leave_a_process_behind(rank: int, world: int) -> None:
    if rank == 1:
        if os.fork() == 0:
            time.sleep(20)  # with the pipe of the rank
        os._exit(8)


def hang_here(rank: int, world: int) -> None:
    while rank == 1:
        time.sleep(0.1)


def crash(rank: int, world: int) -> int:
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    if rank == 1:
        os.abort()
    print("rank", rank, "was here", file=sys.stderr)
    return int(total)


def test_every_rank_answers_in_order(pool2: Run) -> None:
    results = pool2(identify, "a", "b", number=3)
    assert [result[:4] for result in results] == [(rank, 2, ("a", "b"), {"number": 3}) for rank in range(2)]
    assert results == pool2(identify, "a", "b", number=3), "the same processes serve the next job"


@pytest.mark.parametrize("world", [2, 3, 4])
def test_ranks_reach_each_other(run: Run, world: int) -> None:
    assert run(world, add_up) == [torch.tensor([world * (world + 1) / 2])] * world


def test_tensors_come_by_value(pool2: Run) -> None:
    for rank, result in enumerate(pool2(views)):
        assert torch.equal(result["small"], torch.tensor([rank, rank + 1.0]))
        assert result["small"].untyped_storage().nbytes() == 8
        assert not result["small"].requires_grad
        assert result["image"].is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(result["image"], torch.arange(24.0).view(1, 2, 3, 4))
        assert (result["empty"].shape, result["empty"].dtype) == ((0, 3), torch.int8)


def test_a_job_leaves_no_traces(pool2: Run) -> None:
    first, second = pool2(settings), pool2(settings)
    assert first == second
    assert first[0] == first[1]
    assert first[0][2:] == (1, True)


def test_a_pool_full_of_groups_is_replaced(pool2: Run) -> None:
    pool.discard(2)  # for one without the groups of other tests
    few = pool2(make_groups, 2)
    many = pool2(make_groups, MANY_GROUPS)
    assert few == many
    assert set(many).isdisjoint(pool2(make_groups, 0))


def test_deprecations_of_torch_are_errors_in_a_job(pool2: Run) -> None:
    assert pool2(warned) == [[FutureWarning, DeprecationWarning]] * 2


def test_all_tracebacks_come_back(pool2: Run) -> None:
    with pytest.raises(JobFailed) as failure:
        pool2(fail_alike)
    assert "tests.repository.test_harness.fail_alike failed on a pool of 2 ranks" in str(failure.value)
    for rank in range(2):
        assert f"ValueError: no from rank {rank}" in failure.value.errors[rank]
        assert failure.value.errors[rank] in str(failure.value)
    assert pool2(add_up) == [torch.tensor([3.0])] * 2, "the next job gets a fresh pool"


def test_who_waits_for_a_failed_rank_shows_its_stack(pool2: Run) -> None:
    with pytest.raises(JobFailed) as failure:
        pool2(fail_alone)
    assert "--- rank 0 did not answer" in str(failure.value) or "--- rank 0 raised" in str(failure.value)
    assert "in fail_alone" in str(failure.value)
    assert "ValueError: no from rank 1" in failure.value.errors[1]


def test_a_dead_rank_is_named(pool2: Run) -> None:
    with pytest.raises(JobFailed, match=r"(?s)--- rank 1 died with exit code 7:\nfamous last words"):
        pool2(die_alone)


def test_so_is_one_that_leaves_a_process_behind(pool2: Run) -> None:
    with pytest.raises(JobFailed, match=r"(?s)--- rank 1 died with exit code 8:"):
        pool2(leave_a_process_behind, timeout=10)


def test_a_hanging_rank_shows_its_stack(pool2: Run) -> None:
    with pytest.raises(JobFailed) as failure:
        pool2(hang_here, timeout=4)
    assert "--- rank 0 finished\n--- rank 1 did not answer within 4 s; it stands here:" in str(failure.value)
    assert "in hang_here" in str(failure.value)


def test_fresh_processes_may_crash() -> None:
    good, bad = fresh.run(2, crash)
    assert (good.exit_code, good.result, good.error) == (0, 2, None)
    assert "rank 0 was here" in good.output
    assert (bad.exit_code, bad.result) == (-6, None)
    assert "Fatal Python error: Aborted" in bad.output


def test_fresh_processes_may_raise_and_hang() -> None:
    first, second = fresh.run(2, fail_or_hang, timeout=6)
    assert first.exit_code == 1
    assert first.error is not None and "ValueError: no from rank 0" in first.error
    assert second.exit_code is None
    assert second.error is not None and "in fail_or_hang" in second.error


def fail_or_hang(rank: int, world: int) -> None:
    if rank == 0:
        raise ValueError("no from rank 0")
    while True:
        time.sleep(0.1)


def imported_late(rank: int, world: int) -> list[str]:
    """Modules of the server of ranks that it has not imported before it forked this rank, which imports this one."""
    before = [*sys.modules]
    return [name for name in _PRELOADED if name not in before[: before.index(__name__)]]


def test_ranks_are_forked_from_a_server_that_has_imported_what_they_need() -> None:
    """With ``--processes``, too, which starts the server before the first rank."""
    (rank,) = fresh.run(1, imported_late)
    assert rank.result == [], rank


class Left:
    """Says when it is freed, which the end of its process does."""

    def __del__(self, write: Any = os.write) -> None:
        write(1, b"freed with its module\n")


def leave_something(rank: int, world: int) -> None:
    threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()
    threading.Timer(0.2, os.write, (1, b"joined\n")).start()
    atexit.register(os.write, 1, b"called at exit\n")
    print("flushed")
    globals()["left"] = Left()


def test_the_end_of_a_forked_rank_is_that_of_an_interpreter() -> None:
    (ended,) = fresh.run(1, leave_something)
    assert ended.exit_code == 0
    written = ended.output.splitlines()
    written.remove("flushed")  # at the end, or at once where output is not buffered
    assert written == ["joined", "called at exit", "freed with its module"]


def leave(rank: int, world: int, pipe: Connection) -> None:
    sys.exit(3)


def test_two_threads_that_look_at_once_find_how_a_rank_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one does that starts a rank while another one waits for the end of its own."""
    ranks = Ranks(1, leave)
    (process,) = ranks.processes
    connection.wait([process.sentinel], 60)
    looked, wait = threading.Barrier(2), connection.wait

    def together(*args: Any) -> list[Any]:
        found = wait(*args)
        with contextlib.suppress(threading.BrokenBarrierError):
            looked.wait(0.5)
        return found

    monkeypatch.setattr(connection, "wait", together)
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(lambda each: each.exitcode, [process, process])) == [3, 3]
    ranks.kill()


def test_fake_world_has_any_size() -> None:
    with fake_world(1024, rank=1000) as group:
        assert (group.rank(), group.size()) == (1000, 1024)
        dist.all_reduce(torch.ones(1))
    assert not dist.is_initialized()


def test_memory_is_exact() -> None:
    with Recording() as recording:
        weight = torch.empty(1000)
        recording.mark("built")
        storage = weight.untyped_storage()
        storage.resize_(0)
        recording.mark("freed")
        storage.resize_(8000)
        recording.mark("grown")
        product = torch.ones(100, 100, requires_grad=True).exp()  # exp saves its result for backward
        recording.mark("forward")
        del weight, storage, product
    assert recording.between(None, "built") == Usage(0, 4000, 4000)
    assert recording.between("built", "freed") == Usage(4000, 4000, 0)
    assert recording.between("freed", "grown") == Usage(0, 8000, 8000)
    assert recording.between("grown", "forward") == Usage(8000, 88000, 88000)
    assert recording.between("forward") == Usage(88000, 88000, 0)


def test_peak_bytes_counts_temporaries_and_keeps_the_result() -> None:
    base = torch.ones(1000)
    assert peak_bytes(lambda: base.neg().exp()) == (8000, 4000)


def where(*ranks: int) -> tuple[str, list[str]]:
    return os.getcwd(), sorted(os.listdir())


SPAWNED = "import os, pathlib; pathlib.Path({!r}, 'spawned').write_text(os.getcwd())"  # imports nothing of ours
SPAWNS = """
import multiprocessing, os
def where():
    print(os.getcwd())
if __name__ == "__main__":
    where()
    process = multiprocessing.get_context("spawn").Process(target=where)
    process.start()
    process.join()
"""


def test_a_test_runs_in_an_empty_folder_and_so_does_all_that_it_starts(
    pool2: Run, pytestconfig: pytest.Config, tmp_path: Path
) -> None:
    here = os.getcwd()
    assert Path(here).parent.parent == Path(tempfile.gettempdir()).resolve()
    assert where() == (here, [])
    assert pool2(where) == [(here, [])] * 2
    assert [rank.result for rank in fresh.run(2, where)] == [(here, [])] * 2
    assert [rank.result for rank in fresh.run(2, where, folder=tmp_path)] == [(str(tmp_path), [])] * 2
    process = multiprocessing.get_context("spawn").Process(target=exec, args=(SPAWNED.format(str(tmp_path)),))
    process.start()
    process.join(120)
    assert (tmp_path / "spawned").read_text() == here
    (tmp_path / "spawns.py").write_text(SPAWNS)
    ran = commands.run(tmp_path / "spawns.py", folder=Path(here), environment=os.environ)
    assert (ran.stdout, ran.stderr) == (f"{here}\n" * 2, "")
    ran = subprocess.run([sys.executable, "-c", "import os; print(os.getcwd())"], capture_output=True, text=True)
    assert ran.stdout == f"{here}\n"


@pytest.mark.parametrize("again", range(2))
def test_what_a_test_writes_there_is_gone_for_the_next_one(pool2: Run, again: int) -> None:
    assert pool2(where) == [(os.getcwd(), [])] * 2
    Path("train-out").mkdir()


@pytest.mark.ranks(2, where)
def test_jobs_of_marks_have_a_folder_each(outcomes: list[fresh.Outcome], folder: Path) -> None:
    assert [rank.result for rank in outcomes] == [(str(folder), [])] * 2
