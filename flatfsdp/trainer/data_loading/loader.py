"""The loader: the steps of a dataset, from any position, on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch.distributed as dist
from torch.utils.data import IterableDataset, default_collate

from flatfsdp.errors import (
    AgreementError,
    CheckpointError,
    ConfigTypeError,
    ConfigValueError,
    FlatFSDPError,
    LostRankError,
    by_ranks,
    ranks_by_value,
    ranks_in_words,
    shown,
)
from flatfsdp.messages import on_all_ranks
from flatfsdp.trainer.process_group import EXCHANGE, LocalFailure, TrainerRanks

from .batch_sources import DispatchedSource, ShardedSource
from .sample_reader import (
    Collate,
    DataError,
    Microbatch,
    MicrobatchSlice,
    SampleReader,
    StepPart,
    StreamSource,
    Weigh,
    map_parts,
    raised,
    stream_parts,
    weighed,
)
from .sampling import DataPosition, SampleOrder, StepLayout

MODES = ("sharded", "dispatch")


@dataclass(frozen=True)
class Step:
    """This rank's part of a step.

    Attributes:
        microbatches: at least one, and as many on all ranks.
        weight: the total weight of the microbatches of all ranks.
        position: of its first sample.
        first: the number of this rank's first microbatch among the `count` of all ranks. [Note: position]
    """

    microbatches: tuple[Microbatch, ...]
    weight: int
    position: int = 0
    first: int = 0
    count: int = 1


class Loader(AbstractContextManager["Loader"]):
    """The training samples of a rank, step by step. Collective: every rank makes one.

    The samples of a step depend only on the position and the global batch. [Note: position]

    Args:
        dataset: with `__len__` and `__getitem__`: samples are read by number, in any order. Or iterable: read in its
            own order, which must be the same each time and on every rank. Every epoch iterates over it once, after
            `set_epoch(epoch)` if it has that method. If it has `state_dict()` and `load_state_dict(state)`, so that the
            next iterator continues from a state and later ones start from the beginning, it resumes by them; otherwise
            by reading the consumed samples again. In dispatch mode, only the dataset of rank 0 is used; the others may
            pass None.
        batch: the largest number of samples in a microbatch.
        accumulate: microbatches of each rank in a step.
        global_batch: samples of a step, over all ranks; then the number of microbatches follows from it.
        collate: makes inputs of a list of samples; default: torch's `default_collate`.
        weigh: the weight of the inputs of a microbatch, for example its tokens; default: the number of samples. Ranks
            exchange the sum over a step together with whether all could read it.
        shuffle: whether each epoch is a new permutation. An iterable dataset has to do that itself.
        seed: of the permutations, and of random numbers drawn by samples. [Note: randomness]
        epochs: the number of passes over the dataset; None: unlimited.
        drop_last: leave out the last step if it is smaller than the others.
        limit: the largest number of samples in all steps together; None: no limit.
        mode: "sharded": each rank reads its own samples. "dispatch": rank 0 reads, a step ahead, and sends.
        workers: processes that read ahead, on each rank that reads; at most one for an iterable dataset.
        whole_batches: whether microbatches have `batch` samples, except the last of a step, so that they are the same
            on any number of ranks; otherwise their sizes differ by at most one.
        process_group: the ranks that load together; default: all, or this process alone without a process group.

    Raises:
        ConfigValueError, ConfigTypeError: an argument is not accepted; the other ranks get a DataError with the reason.
        AgreementError: on all ranks: arguments, or lengths of the dataset, differ between them.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        batch: int,
        accumulate: int = 1,
        global_batch: int | None = None,
        collate: Collate | None = None,
        weigh: Weigh | None = None,
        shuffle: bool = True,
        seed: int = 0,
        epochs: int | None = None,
        drop_last: bool = False,
        limit: int | None = None,
        mode: str = "sharded",
        workers: int = 0,
        whole_batches: bool = False,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        self._ranks = TrainerRanks(process_group)
        self._dataset = dataset
        self._collate: Collate = collate or default_collate
        self._weigh = weigh
        self._plan = _agreed(
            self._ranks,
            lambda: _CommonArguments(
                extent=_DatasetExtent.of(dataset) if mode != "dispatch" or self._ranks.rank == 0 else None,
                batch=batch,
                accumulate=accumulate,
                global_batch=global_batch,
                shuffle=shuffle,
                seed=seed,
                epochs=epochs,
                drop_last=drop_last,
                limit=limit,
                mode=mode,
                workers=workers,
                whole_batches=whole_batches,
            ),
        )
        assert self._plan.extent is not None
        self._extent = self._plan.extent
        self._shuffle, self._seed = shuffle, seed
        self.global_batch = global_batch or self._ranks.world * batch * accumulate
        self._place = DataPosition()
        self._delivery: ShardedSource | DispatchedSource | None = None
        self._is_over = False
        self._warn_of_what_has_no_effect()

    @property
    def position(self) -> int:
        """Samples consumed by all ranks together. [Note: position]"""
        return self._place.position

    @property
    def reads_by_number(self) -> bool:
        """Whether samples have numbers, so that they can be read again."""
        return not self._extent.is_stream

    @property
    def epoch(self) -> int:
        """The epoch of the position, from 0; for an iterable dataset, the epoch of the last consumed sample."""
        return self._place.epoch

    @property
    def accumulate(self) -> int:
        """The number of microbatches of each rank in every step except the last."""
        return self._steps(None).microbatches(self.global_batch)

    @property
    def steps_per_epoch(self) -> int | None:
        """The number of steps that consume a whole epoch; None for an iterable dataset of unknown length.

        Steps cross the borders of epochs: several epochs may take fewer steps than this many times their number.
        """
        length = self._extent.length
        return None if length is None else -(-length // self.global_batch)

    @property
    def steps_left(self) -> int | None:
        """The number of steps from here to the end of all epochs; None where it is unknown or unlimited."""
        total = self._plan.total(self._extent.length)
        return self._steps(total).left(self.position)

    def next_step(self, local: LocalFailure | None = None) -> Step | None:
        """This rank's part of the next step; None on all ranks once there is none. Collective.

        Args:
            local: a failure of this rank since the last step, outside of the loader: all ranks raise because of it,
                unless there is no next step. It needs no additional exchange.

        Raises:
            Exception: the `local` failure's own; AgreementError on the other ranks.
            DataError: on all ranks: a sample could not be read, collated, or sent. The position is unchanged.
            AgreementError: on all ranks: an iterable dataset gives them different samples.
            LostRankError: another rank has ended.
        """
        if self._is_over:
            return None
        if self._delivery is None:
            dispatches = self._plan.mode == "dispatch" and self._ranks.world > 1
            self._delivery = (DispatchedSource if dispatches else ShardedSource)(self._open, self._ranks)
        try:
            part = self._delivery.next(local)
        except Exception:
            with suppress(LostRankError):  # the first error is more informative
                self.close()
            raise
        if part is None:
            self.close()
            self._is_over = True
            return None
        before, self._place = self.position, part.after
        steps, samples = self._steps(None), self.position - before
        return Step(part.shares[0], part.weight, before, steps.first(samples, self._ranks.rank), steps.cells(samples))

    def read(self, step: Step, number: int) -> Step:
        """A `step` with whole batches, of which this rank has microbatch `number` of all ranks', read by it alone.
        Raises DataError."""
        assert self._extent.length is not None
        order = SampleOrder(self._extent.length, shuffle=self._shuffle, seed=self._seed)
        first = step.position + number * self._plan.batch
        samples = self._steps(self._plan.total(self._extent.length)).at(step.position)
        positions = range(first, min(first + self._plan.batch, samples.stop))
        reader = SampleReader(self._dataset, self._collate, self._seed)
        found = next(raised(iter([reader[MicrobatchSlice(order.ids(positions), positions)]])))
        return replace(step, microbatches=(found,), first=number)

    def state_dict(self) -> dict[str, Any]:
        """The position, and the parameters that determine the order of samples; the same on all ranks.

        A step counts as consumed from when `next_step` returned it: to be saved between the steps of a training.
        """
        return {
            **asdict(self._place),
            "global_batch": self.global_batch,
            "shuffle": self._shuffle,
            "seed": self._seed,
            "length": _length(self._extent),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume at `state`, from `state_dict` on any number of ranks; called equally on all ranks.

        The global batch and the order are those of `state`, with a warning where batch, accumulate and ranks would give
        another. A global batch passed to the constructor takes precedence, with a warning; so do the limits: epochs,
        limit, drop_last.

        Raises:
            CheckpointError: it is for another dataset, or is not a state of a loader.
        """
        missing = sorted(self.state_dict().keys() - state.keys())
        if missing:
            raise CheckpointError(
                f"data position: the state of the loader lacks {', '.join(map(repr, missing))}; pass the "
                "state_dict() of a Loader, or resume without the data position"
            )
        length = _length(self._extent)
        if state["length"] != length:
            raise CheckpointError(
                f"data position: it was saved for {_in_words(state['length'])}, but this loader has "
                f"{_in_words(length)}. A position means nothing in other data: pass the dataset of the resumed run, "
                "or resume without the data position"
            )
        for name, given in (("shuffle", self._shuffle), ("seed", self._seed)):
            if state[name] != given:
                self._ranks.warn(
                    f"data position: {name}={state[name]!r} of the resumed run is kept; with {name}={given!r}, some "
                    "samples would be seen twice, and others not at all"
                )
        self.close()
        self._shuffle, self._seed = state["shuffle"], state["seed"]
        if self._plan.global_batch is None:
            if self.global_batch != state["global_batch"]:
                self._ranks.warn(
                    f"data position: a step keeps the {state['global_batch']} samples of the resumed run; batch=, "
                    f"accumulate= and ranks= as they are now would make {self.global_batch}: set "
                    f"global_batch={self.global_batch} to use as many"
                )
            self.global_batch = state["global_batch"]
        elif self._plan.global_batch != state["global_batch"]:
            self._ranks.warn(
                f"data position: the resumed run took {state['global_batch']} samples per step; from now on, it is "
                f"global_batch={self._plan.global_batch}, as requested"
            )
        self._place = DataPosition(**{name: state[name] for name in asdict(DataPosition())})
        self._is_over = False

    def close(self) -> None:
        """End the worker processes and drop their prefetched samples; `next_step` starts them again at the position.

        To be called at the same step on all ranks.
        """
        delivery, self._delivery = self._delivery, None
        if delivery is not None:
            delivery.close()

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _steps(self, total: int | None) -> StepLayout:
        plan = self._plan
        return StepLayout(
            self.global_batch,
            plan.batch,
            self._ranks.world,
            total=total,
            drop_last=plan.drop_last,
            whole_batches=plan.whole_batches,
        )

    def _open(self, ranks: range) -> Iterator[StepPart]:
        """The parts of `ranks` in all steps from the position on. Worker processes start with the first part: where
        that fails, all ranks raise."""
        return weighed(self._stream(ranks) if self._extent.is_stream else self._map(ranks), self._weigh)

    def _stream(self, ranks: range) -> Iterator[StepPart]:
        source = StreamSource(
            self._dataset,
            steps=self._steps(self._plan.limit),
            ranks=ranks,
            epochs=self._plan.epochs,
            collate=self._collate,
            seed=self._seed,
            place=self._place,
        )
        return stream_parts(source, workers=self._plan.workers)

    def _map(self, ranks: range) -> Iterator[StepPart]:
        assert self._extent.length is not None
        return map_parts(
            self._dataset,
            order=SampleOrder(self._extent.length, shuffle=self._shuffle, seed=self._seed),
            steps=self._steps(self._plan.total(self._extent.length)),
            ranks=ranks,
            collate=self._collate,
            seed=self._seed,
            workers=self._plan.workers,
            position=self.position,
        )

    def _warn_of_what_has_no_effect(self) -> None:
        if self._extent.is_stream and self._plan.shuffle and not hasattr(self._dataset, "set_epoch"):
            self._ranks.warn(
                "Loader: shuffle=True has no effect on an iterable dataset, which has its own order. Give it a method "
                "set_epoch(epoch) that changes the order of each epoch, or set shuffle=False"
            )
        if self._extent.is_stream and self._plan.workers > 1:
            self._ranks.warn(
                f"Loader: workers={self._plan.workers} has the effect of 1 for an iterable dataset, to keep its order"
            )
        if self.global_batch < self._ranks.world:
            self._ranks.warn(
                f"Loader: a step of global_batch={self.global_batch} samples leaves "
                f"{self._ranks.world - self.global_batch} of {self._ranks.world} ranks without a sample; they compute "
                "one of another rank, which does not count"
            )


def evaluation(dataset: Any, *, batch: int, limit: int | None = None, **options: Any) -> Iterator[Microbatch]:
    """This rank's microbatches of `dataset`, read once in its order; in the same number on all ranks. Collective.

    Every sample is in one microbatch of one rank. A rank that is left without one gets a stand-in (`ids` empty), to be
    weighed 0. Errors are those of `Loader`.

    Args:
        dataset, batch, options: as of `Loader`: collate, mode, workers, process_group.
        limit: only the first `limit * batch` samples: that many batches over all ranks together, so that the evaluated
            samples do not depend on the number of ranks. None: all.
    """
    samples = None if limit is None else limit * batch
    loader = Loader(dataset, batch=batch, shuffle=False, epochs=1, limit=samples, **options)

    def microbatches() -> Iterator[Microbatch]:
        with loader:
            while (step := loader.next_step()) is not None:
                yield from step.microbatches

    return microbatches()


@dataclass(frozen=True)
class _DatasetExtent:
    """The kind of a dataset, and its number of samples where known."""

    is_stream: bool
    length: int | None

    @classmethod
    def of(cls, dataset: Any) -> _DatasetExtent:
        kind = type(dataset)
        by_number = hasattr(kind, "__getitem__") and hasattr(kind, "__len__")
        if isinstance(dataset, IterableDataset) or not by_number:
            if not hasattr(kind, "__iter__"):
                raise ConfigTypeError(
                    f"dataset: got {shown(dataset)}. Accepted: a dataset with __len__ and __getitem__, or an iterable."
                )
            try:
                return cls(True, len(dataset))
            except TypeError:  # some define the method and raise this
                return cls(True, None)
        if not len(dataset):
            raise ConfigValueError("dataset: it has no samples")
        return cls(False, len(dataset))


@dataclass(frozen=True)
class _CommonArguments:
    """The arguments that ranks must have in common; `extent` is None where the dataset of this rank is not used."""

    extent: _DatasetExtent | None
    batch: int
    accumulate: int
    global_batch: int | None
    shuffle: bool
    seed: int
    epochs: int | None
    drop_last: bool
    limit: int | None
    mode: str
    workers: int
    whole_batches: bool

    def __post_init__(self) -> None:
        for name, least, optional in (
            ("batch", 1, False),
            ("accumulate", 1, False),
            ("global_batch", 1, True),
            ("epochs", 1, True),
            ("limit", 1, True),
            ("workers", 0, False),
        ):
            value = getattr(self, name)
            if value is None and optional:
                continue
            accepted = f"a whole number from {least} up{' or None' if optional else ''}"
            if not isinstance(value, int) or isinstance(value, bool):
                raise ConfigTypeError(f"{name}: got {shown(value)}. Accepted: {accepted}.")
            if value < least:
                raise ConfigValueError(f"{name}: got {value}. Accepted: {accepted}.")
        if self.mode not in MODES:
            raise ConfigValueError(f"mode: got {self.mode!r}. Accepted: {', '.join(map(repr, MODES))}.")

    def total(self, length: int | None) -> int | None:
        """The number of samples in all steps together, for a dataset of `length` samples."""
        ends = [] if length is None or self.epochs is None else [length * self.epochs]
        return min([*ends, *([] if self.limit is None else [self.limit])], default=None)


def _agreed(ranks: TrainerRanks, make: Callable[[], _CommonArguments]) -> _CommonArguments:
    """The common plan of all ranks, with the extent of the ranks that read. Collective.

    Raises:
        FlatFSDPError: on a rank where `make` raised one; DataError on the others.
        AgreementError: on all ranks: they differ.
    """

    def problem(failed: Mapping[int, str], own: Exception | None) -> FlatFSDPError:
        return own if isinstance(own, FlatFSDPError) else DataError(by_ranks(failed, ": "))

    plans = on_all_ranks(
        make, ranks.host, call=EXCHANGE, raises=problem, describe=lambda error: str(DataError.of(error))
    )
    for name in vars(plans[0]):
        found = ranks_by_value({rank: getattr(plan, name) for rank, plan in enumerate(plans)})
        if name == "extent":
            found.pop(None, None)
        if len(found) > 1:
            what = "the length of the dataset" if name == "extent" else name
            each = ", ".join(
                f"{_in_words(_length(value)) if name == 'extent' else repr(value)} on {ranks_in_words(own)}"
                for value, own in found.items()
            )
            raise AgreementError(f"Loader: ranks differ in {what}: {each}; give every rank the same")
    return plans[0]


def _length(extent: _DatasetExtent) -> int | None:
    return None if extent.is_stream else extent.length


def _in_words(length: int | None) -> str:
    return "an iterable dataset" if length is None else f"{length} samples"
