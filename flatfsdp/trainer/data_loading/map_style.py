"""Reading a dataset that has a length: any sample can be asked for, in any order."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader

from .sample_reader import Collate, Microbatch, MicrobatchSlice, ReadFailure, SampleReader, StepPart, raise_failure
from .sampling import SampleOrder, StepLayout


@dataclass(eq=False)
class MapParts:
    """The parts of step after step that some `ranks` have, from `position` on.

    With `workers` processes that many read ahead, two microbatches each; else each is read when it is asked for.
    """

    dataset: Any
    order: SampleOrder
    steps: StepLayout
    ranks: range
    collate: Collate
    seed: int
    workers: int
    position: int

    def __post_init__(self) -> None:
        cells = planned(self.order, self.steps, ranks=self.ranks, position=self.position)
        reader = SampleReader(self.dataset, self.collate, self.seed)
        self._microbatches: Iterator[Microbatch | ReadFailure] = (
            in_processes(reader, self.workers, sampler=cells) if self.workers else map(reader.__getitem__, cells)
        )

    def __iter__(self) -> Iterator[StepPart]:
        return self

    def __next__(self) -> StepPart:
        """The parts of the next step.

        Raises:
            DataError: one of its microbatches could not be made.
        """
        step = self.steps.at(self.position)
        if not step:
            raise StopIteration
        each = self.steps.microbatches(len(step))
        shares = tuple(tuple(self._next_microbatch() for _ in range(each)) for _ in self.ranks)
        self.position = step.stop
        return StepPart(shares, after=self.order.place(step.stop))

    def _next_microbatch(self) -> Microbatch:
        found = next(self._microbatches)
        return found if isinstance(found, Microbatch) else raise_failure(found)


def planned(order: SampleOrder, steps: StepLayout, *, ranks: range, position: int) -> Iterator[MicrobatchSlice]:
    """The cells of `ranks` in step after step from `position` on. [Note: position]"""
    while step := steps.at(position):
        for share in steps.shares(step, ranks):
            for positions in share:
                if positions:
                    yield MicrobatchSlice(order.ids(positions), positions)
                else:
                    yield MicrobatchSlice(order.ids(step[:1]), step[:1], stand_in=True)
        position = step.stop


def in_processes(source: Any, workers: int, *, sampler: Iterator[MicrobatchSlice] | None = None) -> Iterator[Any]:
    """What `source` gives, read by `workers` processes, which end when the iterator is given up.

    `source` is an iterable, which one worker goes through, or one that is asked for what `sampler` yields, in order.
    On Linux they are forks: in a rank that was spawned itself they would else be spawned, too, which takes seconds, and
    a dataset that can be pickled.
    """
    loader = DataLoader(
        source,
        batch_size=None,
        sampler=sampler,
        num_workers=workers,
        collate_fn=_as_it_is,
        worker_init_fn=_obey_the_rank_only,
        multiprocessing_context="fork" if workers and sys.platform == "linux" else None,
        generator=torch.Generator(),  # else it draws from the global one, once per iterator
    )
    return iter(loader)


def _as_it_is(value: Any) -> Any:
    return value


def _obey_the_rank_only(worker: int) -> None:
    """A signal to all processes of a job stops its ranks in good order; a worker that it ended would break that off,
    since torch raises an error in a rank whose worker dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):  # not on macOS
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_end_when_told_by_the_rank, daemon=True).start()


def _end_when_told_by_the_rank() -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)
