"""Jobs in a running pool of gloo workers: the cheap way (milliseconds) to run a function on 2, 3 or 4 ranks.

`run` starts the pool of a world size at its first use and keeps it for the whole test run. A pool whose job failed,
died or hung is killed, because its ranks may still wait for something; the next job gets a new one. So does the job
after one that left more than `MANY_GROUPS` process groups behind: each holds sockets and threads, and it is unknown
which of them the engine keeps for its next model. So does the job after one that ended with ranks that have issued
different collectives.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import pickle
import random
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from tests.harness import inspect
from tests.harness.processes import STARTUP_TIMEOUT, Ranks, dumps, end_with_the_server
from tests.harness.thorough import is_thorough

MANY_GROUPS = 40
CAN_PAUSE = sys.platform == "linux"
GRACE = 3.0  # seconds for the other ranks to answer once one of them has failed


class JobFailed(Exception):
    """A job raised, died or hung on at least one rank. The message has every rank's traceback, stack or last output.

    ``errors``: rank to the text of its exception, for ranks that raised one.
    """

    def __init__(self, message: str, errors: dict[int, str]) -> None:
        super().__init__(message)
        self.errors = errors


@dataclass(frozen=True)
class _Answer:
    result: Any
    error: str | None
    groups: int  # process groups that exist in the worker
    issued: dict[str, object]  # by all ranks, so the same on each


def run(world: int, fn: Callable[..., Any], /, *args: Any, timeout: float = 120.0, **kwargs: Any) -> list[Any]:
    """``fn(rank, world, *args, **kwargs)`` on every rank of a pool; the results, in rank order.

    ``fn`` is a function at the top of a module. It runs in the folder in which this process is. The default process
    group is a gloo group of ``world`` ranks, torch uses one thread and is seeded alike on all ranks, and torch's
    deprecation warnings are errors.

    Raises:
        JobFailed: a rank raised, died, or did not answer within ``timeout`` seconds.
    """
    pool = _pools.get(world)
    pause_all(but=pool)
    if pool is None:
        pool = _pools[world] = _Pool(world)
    pool.ranks.resume()
    try:
        results = pool.run(fn, args, kwargs, timeout)
    except BaseException:
        discard(world)
        raise
    if pool.groups > MANY_GROUPS or pool.parted:
        discard(world)
    return results


def discard(world: int) -> None:
    """Kill the pool of this world size, if there is one."""
    pool = _pools.pop(world, None)
    if pool is not None:
        pool.ranks.kill()


def pause_all(but: _Pool | None = None) -> None:
    """Stop every other pool until its next job: threads of gloo and of the engine look for work 100 times a second."""
    for pool in _pools.values():
        if CAN_PAUSE and pool is not but:
            pool.ranks.pause()


def discard_all() -> None:
    """Kill every pool."""
    for world in list(_pools):
        discard(world)


class _Pool:
    def __init__(self, world: int) -> None:
        self.ranks = Ranks(world, _serve)
        self.groups = 1
        self.parted = False
        try:
            self._collect(STARTUP_TIMEOUT, "starting the pool")
        except BaseException:
            self.ranks.kill()
            raise

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], timeout: float) -> list[Any]:
        job = dumps((os.getcwd(), fn, args, kwargs))
        for pipe in self.ranks.pipes:
            # A worker that died since its last job breaks the pipe; waiting for its answer reports that.
            with contextlib.suppress(BrokenPipeError):
                pipe.send_bytes(job)
        return self._collect(timeout, f"{fn.__module__}.{fn.__qualname__}")

    def _collect(self, timeout: float, what: str) -> list[Any]:
        """Every rank's result of the current job."""
        answers: dict[int, _Answer] = {}
        dead: set[int] = set()
        deadline = time.monotonic() + timeout
        limit = timeout
        while waiting := [rank for rank in range(self.ranks.world) if rank not in answers and rank not in dead]:
            pipes = {rank: self.ranks.pipes[rank] for rank in waiting}
            # A process that a dead rank has forked may keep its pipe open.
            ends = [self.ranks.processes[rank].sentinel for rank in waiting]
            ready = wait([*pipes.values(), *ends], max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for rank, pipe in pipes.items():
                if pipe in ready or pipe.poll():
                    try:
                        answers[rank] = pickle.loads(pipe.recv_bytes())
                    except EOFError:
                        dead.add(rank)
                elif self.ranks.processes[rank].sentinel in ready:
                    dead.add(rank)
            if dead or any(answer.error for answer in answers.values()):
                limit = min(limit, GRACE)
                deadline = min(deadline, time.monotonic() + GRACE)
        errors = {rank: answer.error for rank, answer in answers.items() if answer.error is not None}
        if errors or len(answers) < self.ranks.world:
            raise JobFailed(self._story(what, errors, dead, answers, limit), errors)
        self.groups = max(answer.groups for answer in answers.values())
        places = itertools.chain.from_iterable(answer.issued.items() for answer in answers.values())
        self.parted = len(set(places)) > len({group for answer in answers.values() for group in answer.issued})
        return [answers[rank].result for rank in range(self.ranks.world)]

    def _story(
        self, what: str, errors: dict[int, str], dead: set[int], answers: dict[int, _Answer], limit: float
    ) -> str:
        """A report of all ranks, in one text."""
        hung = [rank for rank in range(self.ranks.world) if rank not in answers and rank not in dead]
        stacks = self.ranks.stacks(hung)
        parts = [f"{what} failed on a pool of {self.ranks.world} ranks"]
        for rank in range(self.ranks.world):
            if rank in errors:
                parts.append(f"--- rank {rank} raised:\n{errors[rank]}")
            elif rank in dead:
                self.ranks.processes[rank].join(5)
                code = self.ranks.processes[rank].exitcode
                parts.append(f"--- rank {rank} died with exit code {code}:\n{self.ranks.output(rank)[-4000:]}")
            elif rank in stacks:
                code, output = self.ranks.processes[rank].exitcode, self.ranks.output(rank)[-4000:]
                place = stacks[rank] or f"nowhere that it shows (exit code {code}); its output ends:\n{output}"
                parts.append(f"--- rank {rank} did not answer within {limit:g} s; it stands here:\n{place}")
            else:
                parts.append(f"--- rank {rank} finished")
        return "\n".join(parts)


_pools: dict[int, _Pool] = {}
atexit.register(discard_all)


def _serve(rank: int, world: int, pipe: Connection) -> None:
    """The main function of a worker: join the group, then run one job after the other until the parent has ended."""
    if CAN_PAUSE:
        end_with_the_server()
    inspect.share_processors()
    if not is_thorough():
        inspect.make_small_outboxes()
    inspect.share_one_device()
    # Longer than the limit of any job: the parent reports a hanging job, with stacks, not gloo.
    dist.init_process_group("gloo", timeout=timedelta(minutes=10))
    pipe.send_bytes(dumps(_Answer(None, None, _count_groups(), {})))
    with contextlib.suppress(EOFError):
        while True:
            job = pipe.recv_bytes()
            pipe.send_bytes(_answer(rank, world, job))


def _answer(rank: int, world: int, job: bytes) -> bytes:
    try:
        with _job_settings():
            folder, fn, args, kwargs = pickle.loads(job)
            os.chdir(folder)
            result = fn(rank, world, *args, **kwargs)
            issued = {**inspect.issued_by_group(), **inspect.bitmaps_by_group()}
            return dumps(_Answer(result, None, _count_groups(), issued))
    except Exception:
        return dumps(_Answer(None, traceback.format_exc(), _count_groups(), {}))


@contextlib.contextmanager
def _job_settings() -> Iterator[None]:
    """A context that gives each job the same state as the first one."""
    random.seed(0)
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)  # torch's deprecations
        warnings.filterwarnings("error", category=DeprecationWarning, module=r"torch\.distributed|flatfsdp")
        try:
            yield
        finally:
            torch.set_num_threads(1)
            torch.set_grad_enabled(True)
            torch.set_default_dtype(torch.float32)


def _count_groups() -> int:
    return len(dist.distributed_c10d._world.pg_map)
