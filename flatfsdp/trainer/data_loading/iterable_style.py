"""Reading an iterable dataset: one sample after the other, and the end shows only when it is there.

Whoever reads goes through the whole stream, whichever ranks it reads for: the order of samples is that of the stream,
and where it ends decides how the last step is divided. [Note: position] A place in it is found again by the dataset's
own `state_dict()` and `load_state_dict(state)`, else by reading up to it once more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

from torch.utils.data import IterableDataset

from flatfsdp.trainer.randomness import seed_host, seed_of, untouched_randomness

from .sample_reader import (
    Collate,
    DataError,
    Microbatch,
    StepPart,
    in_processes,
    of_samples,
    raised,
)
from .sampling import DataPosition, StepLayout


def stream_parts(source: StreamSource, *, workers: int) -> Iterator[StepPart]:
    """The parts of step after step that `source` gives, read ahead by another process if there are `workers`.

    Raises:
        DataError: while iterating: a sample could not be read, or samples not be put together.
    """
    yield from raised(in_processes(source, 1) if workers else iter(source))


@dataclass(eq=False)
class StreamSource(IterableDataset[Any]):
    """The parts of step after step that some `ranks` have of `dataset`, from `place` on; it goes to the process that
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
        """The samples from the place on: epoch, number within the epoch, sample."""
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
            seed_host(seed_of(self.seed, begun))  # an iterator may shuffle as it is made
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
                    f"the dataset ended after {found} samples of epoch {epoch}, of which {passed} are consumed; go on "
                    "with the data that the run began with"
                )
            if not found:
                raise DataError(
                    f"the dataset gave no sample in epoch {epoch}; what can be gone through only once, such as a "
                    "generator, does for epochs=1"
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
