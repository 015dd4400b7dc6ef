"""Reading of samples into microbatches; failures are returned as values.

[Note: randomness] Random numbers that a sample draws from the global generators (torch, `random`, and numpy where it is
imported) depend only on the seed and the sample's position: not on the rank or process that reads it, nor on earlier
reads. The generators of the reading process are restored afterwards, so that dropout does not depend on how data are
read.

[Note: sample streams] Every reader of an iterable dataset goes through the whole stream, for any set of ranks: the
order of samples is that of the stream, and its end, which is known only once it is reached, decides how the last step
is divided ([Note: position]). A position in it is found again by the dataset's own `state_dict()` and
`load_state_dict(state)`, or else by reading up to it once more.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from flatfsdp.errors import FlatFSDPError, few
from flatfsdp.trainer.randomness import seed_host, seed_of, untouched_randomness

from .sampling import DataPosition, SampleOrder, StepLayout

Collate = Callable[[list[Any]], Any]
Weigh = Callable[[Any], int]


class DataError(FlatFSDPError, RuntimeError):
    """Samples could not be read, collated or sent; raised on all ranks, with a message that names rank and sample.

    Attributes:
        trace: the traceback, perhaps of another process; "" where the exception itself has it.
    """

    trace = ""

    @classmethod
    def of(cls, error: Exception, *, at: str = "") -> DataError:
        """The DataError for `error`; `at` describes the failed operation."""
        last = traceback.extract_tb(error.__traceback__)[-1:]
        line = "".join(f" ({frame.filename}:{frame.lineno}, in {frame.name})" for frame in last)
        words = str(error) if isinstance(error, DataError) else f"{type(error).__name__}: {error}{line}"
        found = cls(f"{at}: {words}" if at else words)
        found.trace = "".join(traceback.format_exception(error))
        return found


@dataclass(frozen=True)
class Microbatch:
    """The input of one forward.

    Attributes:
        inputs: the result of `collate`; tensors in it are on the CPU.
        ids: the numbers of the samples, in the order that all ranks share: in the dataset, or within the epoch of an
            iterable one. Empty for a stand-in, whose inputs are to be weighed 0.
    """

    inputs: Any
    ids: tuple[int, ...]


@dataclass(frozen=True)
class StepPart:
    """The samples of one step that this process has read.

    Attributes:
        shares: for each rank that was read for, its microbatches.
        after: the position after the step.
        weight: their total weight.
    """

    shares: tuple[tuple[Microbatch, ...], ...]
    after: DataPosition
    weight: int = 0


@dataclass(frozen=True)
class MicrobatchSlice:
    """The samples of one microbatch.

    Attributes:
        ids: the numbers of its samples in the dataset.
        positions: their positions.
        stand_in: whether it is a stand-in: a sample that is read and not counted.
    """

    ids: tuple[int, ...]
    positions: range
    stand_in: bool = False


@dataclass(eq=False)
class SampleReader:
    """Makes microbatches of a dataset with a length; pickled or forked into worker processes.

    Exceptions of dataset and collate are returned: a process that reads for another has to name the sample.
    """

    dataset: Any
    collate: Collate
    seed: int

    def __getitem__(self, cell: MicrobatchSlice) -> Microbatch | DataError:
        with untouched_randomness():
            samples = []
            for number, position in zip(cell.ids, cell.positions, strict=True):
                seed_host(seed_of(self.seed, position))
                try:
                    samples.append(self.dataset[number])
                except Exception as error:
                    return DataError.of(error, at=f"sample {number}")
            try:
                inputs = self.collate(samples)
            except Exception as error:
                return DataError.of(error, at=of_samples("collate", cell.ids))
        return Microbatch(inputs, () if cell.stand_in else cell.ids)


def of_samples(call: str, ids: Sequence[int]) -> str:
    """A description of a `call` with the samples `ids`."""
    return f"{call} of sample{'s' if len(ids) > 1 else ''} {few([str(number) for number in ids])}"


def weighed(parts: Iterator[StepPart], weigh: Weigh | None) -> Iterator[StepPart]:
    """`parts`, each with the weight of its microbatches, or the number of their samples; stand-ins have none.

    Raises:
        DataError: while iterating: a microbatch cannot be weighed; and errors of `parts`.
    """
    for part in parts:
        weight = 0
        for microbatch in (each for share in part.shares for each in share if each.ids):
            try:
                weight += len(microbatch.ids) if weigh is None else int(weigh(microbatch.inputs))
            except Exception as error:
                raise DataError.of(error, at=of_samples("weight", microbatch.ids)) from error
        yield replace(part, weight=weight)


def raised(found: Iterator[Any]) -> Iterator[Any]:
    """`found`, except that failures, which may come from another process, are raised."""
    for each in found:
        if isinstance(each, DataError):
            raise each from DataError(each.trace)
        yield each


def map_parts(
    dataset: Any,
    *,
    order: SampleOrder,
    steps: StepLayout,
    ranks: range,
    collate: Collate,
    seed: int,
    workers: int,
    position: int,
) -> Iterator[StepPart]:
    """The parts of some `ranks` in each step from `position` on.

    With `workers`, that many processes read ahead, two microbatches each; otherwise each is read on demand.

    Raises:
        DataError: while iterating: a microbatch could not be made.
    """
    cells = planned(order, steps, ranks=ranks, position=position)
    reader = SampleReader(dataset, collate, seed)
    microbatches = raised(in_processes(reader, workers, sampler=cells) if workers else map(reader.__getitem__, cells))
    while step := steps.at(position):
        each = range(steps.microbatches(len(step)))
        shares = tuple(tuple(next(microbatches) for _ in each) for _ in ranks)
        position = step.stop
        yield StepPart(shares, after=order.place(position))


def planned(order: SampleOrder, steps: StepLayout, *, ranks: range, position: int) -> Iterator[MicrobatchSlice]:
    """The cells of `ranks` in each step from `position` on. [Note: position]"""
    while step := steps.at(position):
        for share in steps.shares(step, ranks):
            for positions in share:
                if positions:
                    yield MicrobatchSlice(order.ids(positions), positions)
                else:
                    yield MicrobatchSlice(order.ids(step[:1]), step[:1], stand_in=True)
        position = step.stop


def stream_parts(source: StreamSource, *, workers: int) -> Iterator[StepPart]:
    """The parts of each step of `source`, read ahead by another process if there are `workers`.

    Raises:
        DataError: while iterating: a sample could not be read, or samples could not be collated.
    """
    yield from raised(in_processes(source, 1) if workers else iter(source))


@dataclass(eq=False)
class StreamSource(IterableDataset[Any]):
    """The parts of some `ranks` in each step of `dataset`, from `place` on; pickled or forked into the process that
    reads.
    """

    dataset: Any
    steps: StepLayout
    ranks: range
    epochs: int | None
    collate: Collate
    seed: int
    place: DataPosition

    def __iter__(self) -> Iterator[StepPart | DataError]:
        samples, place = self._samples(), self.place
        while True:
            try:
                with untouched_randomness():
                    taken = list(islice(samples, len(self.steps.at(place.position))))
                    if not taken or (self.steps.drop_last and len(taken) < self.steps.global_batch):
                        return
                    epoch, number, _ = taken[-1]
                    has_state = hasattr(self.dataset, "state_dict") and hasattr(self.dataset, "load_state_dict")
                    state = self.dataset.state_dict() if has_state else None
                    place = DataPosition(place.position + len(taken), epoch, number + 1, state)
                    part = self._part([(number, sample) for _, number, sample in taken], place)
            except Exception as error:
                yield DataError.of(error)
                return
            yield part

    def _samples(self) -> Iterator[tuple[int, int, Any]]:
        """The samples from `place` on: (epoch, number within the epoch, sample)."""
        start, begun = self.place, self.place.position - self.place.offset
        for epoch in count(start.epoch) if self.epochs is None else range(start.epoch, self.epochs):
            resuming = epoch == start.epoch
            passed = start.offset if resuming else 0
            if hasattr(self.dataset, "set_epoch"):
                self.dataset.set_epoch(epoch)
            restored = resuming and start.dataset is not None
            if restored:
                self.dataset.load_state_dict(start.dataset)
            found = passed if restored else 0
            seed_host(seed_of(self.seed, begun))  # an iterator may shuffle when it is created
            iterator = iter(self.dataset)
            while True:
                seed_host(seed_of(self.seed, begun + found))
                try:
                    sample = next(iterator)
                except StopIteration:
                    break
                except Exception as error:
                    raise DataError.of(error, at=f"sample {found} of epoch {epoch}") from error
                found += 1
                if found > passed:
                    yield epoch, found - 1, sample
            if found < passed:
                raise DataError(
                    f"the dataset ended after {found} samples of epoch {epoch}, but {passed} were consumed before; "
                    "resume with the data that the run began with"
                )
            if not found:
                raise DataError(
                    f"the dataset yielded no samples in epoch {epoch}; an iterable that can be read only once, such as "
                    "a generator, works only with epochs=1"
                )
            begun += found

    def _part(self, samples: list[tuple[int, Any]], after: DataPosition) -> StepPart:
        step = range(after.position - len(samples), after.position)
        shares = []
        for cells in self.steps.shares(step, self.ranks):
            share = []
            for positions in cells:
                own = samples[positions.start - step.start : positions.stop - step.start]
                ids = tuple(number for number, _ in own)
                share.append(Microbatch(self._collated(own or samples[:1]), ids))
            shares.append(tuple(share))
        return StepPart(tuple(shares), after)

    def _collated(self, samples: list[tuple[int, Any]]) -> Any:
        try:
            return self.collate([sample for _, sample in samples])
        except Exception as error:
            raise DataError.of(error, at=of_samples("collate", [number for number, _ in samples])) from error


def in_processes(source: Any, workers: int, *, sampler: Iterator[MicrobatchSlice] | None = None) -> Iterator[Any]:
    """The results of `source`, read by `workers` processes, which end when the iterator is dropped.

    `source` is an iterable, for one worker, or maps the items of `sampler`, in order, to results. On Linux the workers
    are forks: in a rank that was itself spawned, they would otherwise be spawned, too, which takes seconds and needs a
    dataset that can be pickled.
    """
    loader = DataLoader(
        source,
        batch_size=None,
        sampler=sampler,
        num_workers=workers,
        collate_fn=_as_it_is,
        worker_init_fn=_ignore_signals_but_the_rank_s,
        multiprocessing_context="fork" if workers and sys.platform == "linux" else None,
        generator=torch.Generator(),  # otherwise it draws from the global one, once per iterator
    )
    return iter(loader)


def _as_it_is(value: Any) -> Any:
    return value


def _ignore_signals_but_the_rank_s(worker: int) -> None:
    """Ignore signals that ranks handle. A signal to all processes of a job lets its ranks stop in an orderly way; an
    ended worker would interrupt that, since torch raises an error in a rank whose worker dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):  # not on macOS
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_end_at_signal_of_rank, daemon=True).start()


def _end_at_signal_of_rank() -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)
