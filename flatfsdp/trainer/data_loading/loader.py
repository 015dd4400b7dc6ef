"""The loader: step after step of a dataset, from any position, on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass
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
    StepPart,
    StreamSource,
    Weigh,
    map_parts,
    stream_parts,
    weighed,
)
from .sampling import DataPosition, SampleOrder, StepLayout

MODES = ("sharded", "dispatch")


@dataclass(frozen=True)
class Step:
    """This rank's part of a step.

    Attributes:
        microbatches: as many on all ranks, at least one.
        weight: what the microbatches of all ranks count for together.
    """

    microbatches: tuple[Microbatch, ...]
    weight: int


class Loader(AbstractContextManager["Loader"]):
    """What a rank trains on, step after step. Collective: every rank makes one.

    Which samples make a step depends on the position and the global batch alone. [Note: position]

    Args:
        dataset: with `__len__` and `__getitem__`: samples are asked for by number, in any order. Or iterable: read in
            its own order, which has to be the same each time and on every rank; every epoch goes through it once more,
            and is announced by `set_epoch(epoch)` where it has that. One with `state_dict()` and
            `load_state_dict(state)`, from which the next iterator goes on and any later one begins anew, resumes by
            them; others by reading once more what was consumed. In dispatch mode the dataset of rank 0 counts; the
            others may give None.
        batch: the most samples of a microbatch.
        accumulate: microbatches of each rank in a step.
        global_batch: samples of a step, over all ranks; then there are as many microbatches as that takes.
        collate: makes inputs of a list of samples; default: torch's `default_collate`.
        weigh: what the inputs of a microbatch count for, for example tokens; default: the number of samples. Ranks get
            the sum over a step together with whether all could read it.
        shuffle: whether each epoch is a permutation of its own. An iterable dataset has to see to that itself.
        seed: of the permutations, and of what samples draw at random. [Note: randomness]
        epochs: how often the dataset is gone through; None: for ever.
        drop_last: leave out the last step where it is smaller than the others.
        limit: the most samples of all steps together; None: no such limit.
        mode: "sharded": each rank reads what is its own. "dispatch": rank 0 reads, a step ahead, and sends.
        workers: processes that read ahead, on each rank that reads; one at most reads an iterable dataset.
        process_group: the ranks that load together; default: all, or this process alone where there are no others.

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
    def epoch(self) -> int:
        """The epoch that the position is in, from 0; of an iterable dataset the one of the last sample consumed."""
        return self._place.epoch

    @property
    def accumulate(self) -> int:
        """Microbatches of each rank in a step that is not the last."""
        return self._steps(None).microbatches(self.global_batch)

    @property
    def steps_per_epoch(self) -> int | None:
        """How many steps it takes to consume a whole epoch; None for an iterable dataset that does not know its length.

        Steps cross the borders of epochs: several epochs may take fewer steps than this many times their number.
        """
        length = self._extent.length
        return None if length is None else -(-length // self.global_batch)

    @property
    def steps_left(self) -> int | None:
        """How many steps there are from here to the end of all epochs; None where that is not known, or never comes."""
        total = self._plan.total(self._extent.length)
        return self._steps(total).left(self.position)

    def next_step(self, local: LocalFailure | None = None) -> Step | None:
        """This rank's part of the next step; None on all ranks once there is none. Collective.

        Args:
            local: what this rank has failed at since the last step, outside of the loader: with it, all ranks raise,
                unless there is no next step. It costs no exchange besides that of every step.

        Raises:
            Exception: the `local` failure's own; AgreementError on the other ranks.
            DataError: on all ranks: a sample could not be read, put together, or sent. The position stays where it was.
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
            with suppress(LostRankError):  # the error that is there explains more
                self.close()
            raise
        if part is None:
            self.close()
            self._is_over = True
            return None
        self._place = part.after
        return Step(part.shares[0], part.weight)

    def state_dict(self) -> dict[str, Any]:
        """The position, and what the order that it stands in follows from; the same on all ranks.

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
        """Go on where `state`, from `state_dict` of any number of ranks, was taken; on all ranks alike.

        The global batch and the order are those of `state`, with a warning where batch, accumulate and ranks would make
        another. A global batch that the loader was made with goes before, with a warning; so does the end: epochs,
        limit, drop_last.

        Raises:
            CheckpointError: it was taken of another dataset, or is no state of a loader.
        """
        missing = sorted(self.state_dict().keys() - state.keys())
        if missing:
            raise CheckpointError(
                f"data position: the state of the loader lacks {', '.join(map(repr, missing))}; give what state_dict() "
                "of a Loader returned, or resume without its data position"
            )
        length = _length(self._extent)
        if state["length"] != length:
            raise CheckpointError(
                f"data position: it was saved over {_in_words(state['length'])}, and this loader is over "
                f"{_in_words(length)}; a position means nothing in other data: give the dataset of the run that is "
                "resumed, or resume without its data position"
            )
        for name, given in (("shuffle", self._shuffle), ("seed", self._seed)):
            if state[name] != given:
                self._ranks.warn(
                    f"data position: {name}={state[name]!r} of the run that is resumed is kept; with {name}={given!r} "
                    "some samples would be seen twice, and others not at all"
                )
        self.close()
        self._shuffle, self._seed = state["shuffle"], state["seed"]
        if self._plan.global_batch is None:
            if self.global_batch != state["global_batch"]:
                self._ranks.warn(
                    f"data position: a step of the run that is resumed has {state['global_batch']} samples, and keeps "
                    f"them; batch, accumulate and ranks as they are now would make {self.global_batch}: set "
                    f"global_batch={self.global_batch} to go on with as many"
                )
            self.global_batch = state["global_batch"]
        elif self._plan.global_batch != state["global_batch"]:
            self._ranks.warn(
                f"data position: the run that is resumed took {state['global_batch']} samples a step; from here on it "
                f"is global_batch={self._plan.global_batch}, as asked for"
            )
        self._place = DataPosition(**{name: state[name] for name in asdict(DataPosition())})
        self._is_over = False

    def close(self) -> None:
        """End the processes that read ahead, and forget what they read; `next_step` starts them again at the position.

        To be called at the same step on all ranks.
        """
        delivery, self._delivery = self._delivery, None
        if delivery is not None:
            delivery.close()

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _steps(self, total: int | None) -> StepLayout:
        plan = self._plan
        return StepLayout(self.global_batch, plan.batch, self._ranks.world, total=total, drop_last=plan.drop_last)

    def _open(self, ranks: range) -> Iterator[StepPart]:
        """The parts of `ranks` in step after step from the position on. Processes that read start with the first: where
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
                "Loader: shuffle=True has no effect on an iterable dataset, whose order is its own. Give it a method "
                "set_epoch(epoch) that makes it begin each epoch in another order, or set shuffle=False"
            )
        if self._extent.is_stream and self._plan.workers > 1:
            self._ranks.warn(
                f"Loader: workers={self._plan.workers} are one worker for an iterable dataset: its order is read by one"
            )
        if self.global_batch < self._ranks.world:
            self._ranks.warn(
                f"Loader: a step of global_batch={self.global_batch} samples leaves "
                f"{self._ranks.world - self.global_batch} of {self._ranks.world} ranks without one; they compute "
                "one of others, which counts for nothing"
            )


def evaluation(dataset: Any, *, batch: int, limit: int | None = None, **options: Any) -> Iterator[Microbatch]:
    """This rank's microbatches of `dataset`, read once in its order; equally many on all ranks. Collective.

    Every sample is in one microbatch of one rank. Where that leaves a rank without one, its microbatch is a stand-in
    (`ids` empty), to be weighed 0. Errors are those of `Loader`.

    Args:
        dataset, batch, options: as of `Loader`: collate, mode, workers, process_group.
        limit: the first `limit * batch` samples only: so many batches over all ranks together, that what is evaluated
            does not depend on how many ranks there are. None: all.
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
    """What kind of dataset it is, and how many samples it has, as far as it knows."""

    is_stream: bool
    length: int | None

    @classmethod
    def of(cls, dataset: Any) -> _DatasetExtent:
        kind = type(dataset)
        by_number = hasattr(kind, "__getitem__") and hasattr(kind, "__len__")
        if isinstance(dataset, IterableDataset) or not by_number:
            if not hasattr(kind, "__iter__"):
                raise ConfigTypeError(
                    f"dataset: got {shown(dataset)}. Accepted: what has __len__ and __getitem__, or is iterable."
                )
            try:
                return cls(True, len(dataset))
            except TypeError:  # some have the method and raise this from it
                return cls(True, None)
        if not len(dataset):
            raise ConfigValueError("dataset: it has no samples")
        return cls(False, len(dataset))


@dataclass(frozen=True)
class _CommonArguments:
    """The arguments that ranks must have in common; `extent` is None where the dataset of this rank does not count."""

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
        """Samples of all steps together, of a dataset of `length` samples."""
        ends = [] if length is None or self.epochs is None else [length * self.epochs]
        return min([*ends, *([] if self.limit is None else [self.limit])], default=None)


def _agreed(ranks: TrainerRanks, make: Callable[[], _CommonArguments]) -> _CommonArguments:
    """The plan that every rank made, with the extent of those that read. Collective.

    Raises:
        FlatFSDPError: what `make` raised, on the rank where it did; DataError on the others.
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
