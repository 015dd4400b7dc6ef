"""New processes for one job, which may crash, hang, exit, or need a process in which nothing has run yet.

They take a second instead of milliseconds: use a pool for all other jobs.

Most of these jobs wait for the watchdog, so several jobs of a file run at a time. A test that names its job in a mark
finds the job's outcome in the fixture `outcomes`:

    @pytest.mark.ranks(2, part, of=["case"], timeout=60)  # part(rank, world, case), with the test's parameter
    @pytest.mark.parametrize("case", ["another order", "forwards"])
    def test_ranks_part(outcomes, case): ...

The first such test of a file starts the jobs of all selected tests. Each runs in an empty folder of its own, which the
test finds in the fixture `folder`. With ``in_folder=True``, the job's next argument is its path.
"""

from __future__ import annotations

import pickle
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.harness.processes import STARTUP_TIMEOUT, Ranks, dumps

AT_ONCE = 3  # jobs of a file at a time
LEAVE_TIMEOUT = 90.0  # seconds from a rank's answer to the end of its process


@dataclass(frozen=True)
class Outcome:
    """The outcome of one rank.

    Attributes:
        exit_code: the exit status of its process, negative for the signal that ended it; None when it was still
            running at the timeout (it has been killed since).
        result: the result of the function; None when it did not return.
        error: the traceback of its exception; the Python stacks of a rank still running at the timeout; else None.
        output: everything that it wrote to standard output and error.
    """

    exit_code: int | None
    result: Any
    error: str | None
    output: str


@dataclass(frozen=True)
class Started:
    """The job of a test, and the folder that it may have requested."""

    outcomes: Future[list[Outcome]]
    folder: Path


def run(
    world: int,
    fn: Callable[..., Any],
    /,
    *args: Any,
    timeout: float = 120.0,
    folder: Path | None = None,
    **kwargs: Any,
) -> list[Outcome]:
    """``fn(rank, world, *args, **kwargs)`` in ``world`` new processes; their outcomes, in rank order.

    ``fn`` is a function at the top of a module. It runs in the environment of torchrun, without a process group: the
    first line of most is ``dist.init_process_group("gloo")``. It runs in `folder` (default: this process's). Raises
    nothing for failures of ranks. ``timeout`` in seconds counts from when all ranks have started.
    """
    ranks = Ranks(world, _serve, folder)
    try:
        started = [pipe.poll(STARTUP_TIMEOUT) and pipe.recv() for pipe in ranks.pipes]
        assert all(started), f"ranks did not start: {[ranks.output(rank) for rank in range(world)]}"
        job = dumps((fn, args, kwargs))
        for pipe in ranks.pipes:
            pipe.send_bytes(job)
        deadline = time.monotonic() + timeout
        # Answers are read as they arrive: a rank cannot end before its pipe has been drained.
        answers = [_read(pipe, deadline) for pipe in ranks.pipes]
        for process, answer in zip(ranks.processes, answers, strict=True):
            # A rank that has answered only has to exit, and that time is not tested.
            process.join(LEAVE_TIMEOUT if answer is not None else max(0.0, deadline - time.monotonic()))
        stacks = ranks.stacks([rank for rank in range(world) if ranks.processes[rank].is_alive()])
        return [
            Outcome(
                exit_code=None if rank in stacks else ranks.processes[rank].exitcode,
                result=result,
                error=stacks.get(rank, error),
                output=ranks.output(rank),
            )
            for rank, (result, error) in enumerate(answer or (None, None) for answer in answers)
        ]
    finally:
        ranks.kill()


@contextmanager
def started(items: Sequence[pytest.Item], folder: Path) -> Iterator[dict[str, Started]]:
    """The jobs of marks `ranks`, by the id of their test. `AT_ONCE` of them run at a time, in this order;
    jobs that have not begun by the end of the context are dropped."""
    pool = ThreadPoolExecutor(AT_ONCE)
    marked = [item for item in items if item.get_closest_marker("ranks")]
    folders = [folder / str(number) for number in range(len(marked))]
    try:
        yield {
            item.nodeid: Started(pool.submit(_job_of, item, own), own)
            for item, own in zip(marked, folders, strict=True)
        }
    finally:
        pool.shutdown(cancel_futures=True)


def _job_of(item: pytest.Item, folder: Path) -> list[Outcome]:
    mark = item.get_closest_marker("ranks")
    assert mark is not None
    kwargs = dict(mark.kwargs)
    arguments = [item.callspec.params[name] for name in kwargs.pop("of", ())]  # type: ignore[attr-defined]
    folder.mkdir()
    if kwargs.pop("in_folder", False):
        arguments.insert(0, str(folder))
    return run(*mark.args, *arguments, folder=folder, **kwargs)


def _read(pipe: Connection, deadline: float) -> tuple[Any, str | None] | None:
    """(result, error) of a rank; None when it ended without an answer or did not answer in time."""
    try:
        if pipe.poll(max(0.0, deadline - time.monotonic())):
            answer: tuple[Any, str | None] = pickle.loads(pipe.recv_bytes())
            return answer
    except EOFError:
        pass
    return None


def _serve(rank: int, world: int, pipe: Connection) -> None:
    pipe.send(True)
    try:
        fn, args, kwargs = pickle.loads(pipe.recv_bytes())
        pipe.send_bytes(dumps((fn(rank, world, *args, **kwargs), None)))
    except Exception:
        pipe.send_bytes(dumps((None, traceback.format_exc())))
        raise
    if dist.is_initialized():
        dist.destroy_process_group()
