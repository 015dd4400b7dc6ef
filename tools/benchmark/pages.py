"""The memory of a job, counting pages shared by ranks once, next to the engine's own counts."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

import flatfsdp
from flatfsdp.engine.cpu.chunks import ChunkStream
from flatfsdp.engine.cpu.exchange import CONTROL
from flatfsdp.engine.cpu.segments import MemorySegment

from .jobs import Setting, Training
from .memory import Counter

BEFORE, MAKING, STEPS, REST = "before", "making", "steps", "at rest"
WATCHED = 6  # steps
LONG = 0.5  # seconds of phases without work


def watch_pages(rank: int, setting: Setting, steps: int) -> dict[str, Any]:
    """Bytes of live tensors and outboxes, of the ledger (if the engine has one) and through outboxes, of one rank; on
    rank 0 also the samples of `memory_sampler` for all ranks before the model was made, in ``steps`` steps, and after
    them. Collective.
    """
    _load_libraries()
    pids: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    with ExitStack() as stack:
        sampler = stack.enter_context(_sampler(pids if rank == 0 else []))
        sampler.phase(BEFORE)
        time.sleep(LONG)
        dist.barrier()
        sampler.phase(MAKING)
        counter = Counter()
        peaks = stack.enter_context(_peaks(counter))
        training = Training(rank, setting)
        training.warm_up()
        gc.collect()
        dist.barrier()
        sampler.phase(STEPS)
        peaks.reset()
        engine = flatfsdp.stats(training.model) if setting.engine.startswith("flatfsdp") else None
        if engine is not None:
            engine.reset()
        with outbox_bytes() as posted:
            for _ in range(steps):
                training.step()
        found = {**peaks.found(), "posted": sum(posted) / steps}
        if engine is not None:
            found["ledger peak"] = engine.bytes_peak
        gc.collect()
        dist.barrier()
        sampler.phase(REST)
        time.sleep(LONG)  # the backend's threads release sent tensors
        found["live held"] = counter.live()
        dist.barrier()
        sampler.end()
        dist.barrier()  # all processes stay until the sampling has ended
    return {**found, "process_cpu": time.process_time(), **sampler.found}


def _load_libraries() -> None:
    """Load the libraries of any first step and optimizer before the model is made."""
    linear = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(linear.parameters())
    linear(torch.ones(1, 2)).sum().backward()
    optimizer.step()


@contextmanager
def outbox_bytes() -> Iterator[list[int]]:
    """A context that lists the sizes of all chunks that this rank writes into outboxes."""
    sizes: list[int] = []
    to_post = ChunkStream.to_post

    def counted(self: Any, taken_by_peers: Any) -> Any:
        chunk = to_post(self, taken_by_peers)
        if chunk is not None:  # the caller posts it
            sizes.append(chunk.size)
        return chunk

    with patch.object(ChunkStream, "to_post", counted):
        yield sizes


class _Peaks:
    """Peaks of live tensors, and of their sum with the pages of this rank's outboxes, which its peers map. None without
    a counter."""

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self._held: dict[int, int] = {}
        self.reset()

    def reset(self) -> None:
        """Measure peaks from now on."""
        self._counter.peak()
        self._live = self._both = 0

    def look(self) -> None:
        """Called before the pages of outboxes change."""
        live = self._counter.peak() or 0
        self._live, self._both = max(self._live, live), max(self._both, live + sum(self._held.values()))

    def changed(self, segment: MemorySegment) -> None:
        """Called after the pages of a segment have changed."""
        self._held[id(segment)] = segment.held - CONTROL

    def found(self) -> dict[str, int | None]:
        """Both peaks so far."""
        self.look()
        return {"live peak": self._live or None, "live and outboxes peak": self._both or None}


@contextmanager
def _peaks(counter: Counter) -> Iterator[_Peaks]:
    peaks = _Peaks(counter)

    def watched(plain: Any) -> Any:
        def change(self: MemorySegment, place: int) -> Any:
            peaks.look()
            try:
                return plain(self, place)
            finally:
                peaks.changed(self)

        return change

    with (
        patch.object(MemorySegment, "give_pages_back", watched(MemorySegment.give_pages_back)),
        patch.object(MemorySegment, "take_pages", watched(MemorySegment.take_pages)),
    ):
        yield peaks


class _Sampler:
    """The sampling process, on the rank that has it.

    Attributes:
        found: its output, once it has ended.
    """

    def __init__(self, process: subprocess.Popen[str] | None) -> None:
        self._process = process
        self.found: dict[str, Any] = {}

    def phase(self, name: str) -> None:
        """Begin a phase."""
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.write(name + "\n")
            self._process.stdin.flush()

    def end(self) -> None:
        """End the sampling."""
        if self._process is not None:
            answer, _ = self._process.communicate("\n", timeout=60)
            self.found = json.loads(answer)


@contextmanager
def _sampler(pids: list[int]) -> Iterator[_Sampler]:
    """A context with a sampling process for ``pids``; without one where there are none."""
    if not pids:
        yield _Sampler(None)
        return
    command = [sys.executable, "-m", f"{__package__}.memory_sampler", *map(str, pids)]
    quiet = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=quiet) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield _Sampler(process)
        finally:
            process.kill()
