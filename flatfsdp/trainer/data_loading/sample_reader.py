"""Read samples into microbatches; a failure is a value with its reason.

[Note: randomness] What a sample draws of the global generators (of torch, `random`, and numpy where it is imported)
follows from the seed and the sample's position alone: not from the rank that reads it, nor from the process it is read
in, nor from what was read before. The generators of the process that reads are as before afterwards: dropout does not
notice how data are read.
"""

from __future__ import annotations

import random
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch

from flatfsdp.errors import FlatFSDPError, few

from .sampling import DataPosition, seed_of

Collate = Callable[[list[Any]], Any]
Weigh = Callable[[Any], int]


class DataError(FlatFSDPError, RuntimeError):
    """Samples could not be read, put together or sent; raised on all ranks, in words that name rank and sample."""


@dataclass(frozen=True)
class Microbatch:
    """What one forward takes.

    Attributes:
        inputs: what `collate` made of the samples; tensors in it are on the CPU.
        ids: the numbers of the samples, in the order that all ranks share: in the dataset, or within the epoch of an
            iterable one. Empty for a stand-in, whose inputs are to be weighed 0.
    """

    inputs: Any
    ids: tuple[int, ...]


@dataclass(frozen=True)
class StepPart:
    """What was read of one step.

    Attributes:
        shares: for each rank that was read for, its microbatches.
        after: the place behind the step.
        weight: what they count for together.
    """

    shares: tuple[tuple[Microbatch, ...], ...]
    after: DataPosition
    weight: int = 0


@dataclass(frozen=True)
class ReadFailure:
    """Why something was not read: a line for all ranks, and the traceback for the rank where it happened."""

    words: str
    trace: str

    @classmethod
    def of(cls, error: Exception, *, at: str = "") -> ReadFailure:
        """`error`, which happened at what `at` names."""
        last = traceback.extract_tb(error.__traceback__)[-1:]
        line = "".join(f" ({frame.filename}:{frame.lineno}, in {frame.name})" for frame in last)
        words = str(error) if isinstance(error, DataError) else f"{type(error).__name__}: {error}{line}"
        return cls(words=f"{at}: {words}" if at else words, trace="".join(traceback.format_exception(error)))


@dataclass(frozen=True)
class MicrobatchSlice:
    """What one microbatch is to hold.

    Attributes:
        ids: the numbers of its samples in the dataset.
        positions: their positions.
        stand_in: whether it is one: a sample that is read, and not counted.
    """

    ids: tuple[int, ...]
    positions: range
    stand_in: bool = False


@dataclass(eq=False)
class SampleReader:
    """Makes microbatches of a dataset with a length; it goes to the processes that read.

    What dataset or collate raise is returned: a process that reads for another has to name the sample.
    """

    dataset: Any
    collate: Collate
    seed: int

    def __getitem__(self, cell: MicrobatchSlice) -> Microbatch | ReadFailure:
        with untouched_randomness():
            samples = []
            for number, position in zip(cell.ids, cell.positions, strict=True):
                seed_generators(self.seed, position)
                try:
                    samples.append(self.dataset[number])
                except Exception as error:
                    return ReadFailure.of(error, at=f"sample {number}")
            try:
                inputs = self.collate(samples)
            except Exception as error:
                return ReadFailure.of(error, at=of_samples("collate", cell.ids))
        return Microbatch(inputs, () if cell.stand_in else cell.ids)


def of_samples(call: str, ids: Sequence[int]) -> str:
    """In words: a `call` with the samples `ids`."""
    return f"{call} of sample{'s' if len(ids) > 1 else ''} {few([str(number) for number in ids])}"


def weighed(parts: Iterator[StepPart], weigh: Weigh | None) -> Iterator[StepPart]:
    """`parts`, each with the weight of its microbatches, or the number of their samples; stand-ins have none.

    Raises:
        DataError: while iterating: one cannot be weighed; and what `parts` raises.
    """
    for part in parts:
        weight = 0
        for microbatch in (each for share in part.shares for each in share if each.ids):
            try:
                weight += len(microbatch.ids) if weigh is None else int(weigh(microbatch.inputs))
            except Exception as error:
                raise_failure(ReadFailure.of(error, at=of_samples("weight", microbatch.ids)))
        yield replace(part, weight=weight)


def raise_failure(failure: ReadFailure) -> NoReturn:
    """Raise what happened, perhaps in another process."""
    raise DataError(failure.words) from DataError(failure.trace)


@contextmanager
def untouched_randomness() -> Iterator[None]:
    """The global generators of this process are as before in the end. [Note: randomness]"""
    of_torch, of_python = torch.default_generator.get_state(), random.getstate()
    numpy = sys.modules.get("numpy.random")
    of_numpy = numpy.get_state() if numpy is not None else None
    try:
        yield
    finally:
        torch.default_generator.set_state(of_torch)
        random.setstate(of_python)
        if numpy is not None:
            numpy.set_state(of_numpy)


def seed_generators(seed: int, position: int) -> None:
    """Seed the global generators for the sample at `position`. [Note: randomness]"""
    number = seed_of(seed, position)
    torch.default_generator.manual_seed(number)  # not `torch.manual_seed`, which reaches into accelerators
    random.seed(number)
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        numpy.seed(number % 2**32)
