"""Ranks that have different numbers of batches, or that end a loop of generation at different lengths.

[Note: uneven inputs] Every step of a model is collective, so a rank that has no batch left must still take part. It
repeats its last one as a *stand-in*: the whole body of the loop runs, all collectives are issued, and the gradients of
its backward are dropped as they arrive. Those of the other ranks are multiplied, as they arrive, by the number of ranks
over the number of ranks with data. This is correct for each single backward, and so for several whose gradients are
accumulated before they are reduced.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import TypeVar

from torch import nn

from ...api import check_bool
from ...errors import AgreementError, ConfigValueError, UsageError, ranks_in_words, refuse_type
from ..agreement.agreement import agreement_of
from ..models.rest import check_outside, models_of, quiesce
from ..models.walks import units_in
from ..runtime.model import Model

T = TypeVar("T")

_LOOP = "the loop of flatfsdp.join()"
_DATA, _STAND_IN, _NOTHING = 0, 1, 2  # kinds of batches of a rank in a step
_NO_BATCH = object()


def join(
    model: nn.Module,
    *,
    divide_by_initial_world_size: bool = False,
    enable: bool = True,
    throw_on_early_termination: bool = False,
) -> Joined:
    """A context for loops over different numbers of batches per rank: all ranks continue until none has a batch left.

    A rank without a batch left gets its last one again, as a stand-in. It runs the whole body of the loop with it,
    forward, backward, clipping and optimizer, and adds nothing to the gradients, even if it computes NaN. Gradients are
    those of one process on the batches that exist; also under `no_sync()`, with hybrid sharding, with a communication
    hook. Forwards of stand-ins also update buffers, for example the statistics of batch norm. User-defined losses and
    metrics should leave stand-ins out: `joined.has_data` is False for them.

    Every step begins with one exchange of 24 bytes per rank, for which the host waits. If a single rank leaves the
    loop, by `break` or an exception, an error that names it ends the loop on all ranks; all ranks may leave it in the
    same step. The arguments are those of `torch.distributed.algorithms.join` and of DDP's `join()`.

    Args:
        model: the outermost wrapper. Other loops may run inside the context, also without gradients.
        divide_by_initial_world_size: whether gradients are divided by the number of all ranks in every step, so that
            each batch has the same weight over the whole loop; otherwise, by the number of ranks that have a batch. A
            factor of `set_gradient_divide_factor` takes precedence.
        enable: False for a loop that only iterates.
        throw_on_early_termination: whether to raise on all ranks as soon as one has no batch and others do.

    Returns:
        A context manager: with `as joined`, `joined(batches)` iterates, `joined.until(done)` loops without batches,
        `joined.has_data` is whether this rank has a batch of its own in the running step.

    Raises:
        ConfigTypeError, ConfigValueError: for an argument; `model` is not an outermost wrapper.
        UsageError: in the loop, on all ranks, if a rank has no batch at all and no stand-in.
        AgreementError: in the loop or at the end of the context: ranks make different calls, or with
            `throw_on_early_termination`.

    Example (in a process group of one rank):
        >>> import torch, flatfsdp
        >>> model = flatfsdp.FullyShardedDataParallel(torch.nn.Linear(2, 1), use_orig_params=True)
        >>> with flatfsdp.join(model) as joined:
        ...     for batch in joined([torch.ones(4, 2), torch.zeros(3, 2)]):
        ...         model(batch).sum().backward()
    """
    for name, value in (
        ("divide_by_initial_world_size", divide_by_initial_world_size),
        ("enable", enable),
        ("throw_on_early_termination", throw_on_early_termination),
    ):
        check_bool(f"join: {name}", value)
    if not isinstance(model, nn.Module):
        refuse_type("join: model", model, "the outermost FullyShardedDataParallel module")
    units = units_in(model)
    models = models_of(units)
    if len(models) != 1 or models[0].outermost not in units:
        raise ConfigValueError(
            f"join: model: got a {type(model).__name__} that contains {len(models)} wrapped models or is part of one. "
            "Accepted: the outermost FullyShardedDataParallel module"
        )
    return Joined(
        models[0], by_all=divide_by_initial_world_size, enabled=enable, throw_early=throw_on_early_termination
    )


class Joined:
    """The context manager that `join()` returns.

    Attributes:
        has_data: whether this rank has a batch of its own in the running step, and no stand-in.
    """

    def __init__(self, model: Model, *, by_all: bool, enabled: bool, throw_early: bool) -> None:
        self.has_data = True
        self._model = model
        self._by_all = by_all
        self._enabled = enabled
        self._throw_early = throw_early
        self._looping = False  # inside a loop that the other ranks continue

    def __enter__(self) -> Joined:
        return self

    def __exit__(
        self, cls: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        left = self._looping
        self._end()
        if left:
            agreement_of(self._model.agreement).leave(_LOOP, error)

    def __call__(self, batches: Iterable[T], *, stand_in: object = _NO_BATCH) -> Iterator[T]:
        """Iterate over this rank's `batches`, and over stand-ins until no rank has a batch left. Collective.

        Args:
            batches: of this rank, iterated over once.
            stand_in: a batch to repeat instead of the last one; needed if a rank may have no batch.
        """
        if not self._enabled:
            yield from batches
            return
        model = self._model
        check_outside(model.outermost, _LOOP)
        quiesce(model.units, shards=False)
        self._looping = True
        iterator, kept = iter(batches), stand_in
        for step in itertools.count(1):
            batch: object = next(iterator, _NO_BATCH)
            self.has_data = batch is not _NO_BATCH
            if self.has_data and stand_in is _NO_BATCH:
                kept = batch
            nothing = not self.has_data and kept is _NO_BATCH
            model.iteration.leave_backward()
            found = agreement_of(model.agreement).numbers_of_ranks(
                f"the next batch in {_LOOP}", _NOTHING if nothing else _DATA if self.has_data else _STAND_IN
            )
            with_data = [rank for rank in sorted(found) if found[rank] == _DATA]
            if not with_data:
                break
            self._check(found, with_data, step)
            counts = 1.0 if self._by_all else len(found) / len(with_data)
            model.backwards.weight = counts if self.has_data else 0.0
            try:
                yield batch if self.has_data else kept  # type: ignore[misc]
            finally:
                model.backwards.weight = 1.0  # also after a break
        self._end()

    def until(self, done: Callable[[], bool]) -> Iterator[int]:
        """Loop until `done()` on all ranks, for generation: yields 0, 1, and so on. Collective.

        `done` is called before each step; once it was true on this rank, `has_data` is False, and results of the body
        are to be ignored.

        Example (in a process group of one rank):
            >>> import torch, flatfsdp
            >>> model, tokens = flatfsdp.FullyShardedDataParallel(torch.nn.Embedding(4, 4)), [1]
            >>> with torch.no_grad(), flatfsdp.join(model) as joined:
            ...     for _ in joined.until(lambda: len(tokens) == 3):
            ...         following = int(model(torch.tensor(tokens[-1])).argmax())
            ...         if joined.has_data:
            ...             tokens.append(following)
            >>> len(tokens)
            3
        """
        steps: Iterable[bool] = iter(lambda: bool(done()), True)  # not called again after it was true
        for step, _ in enumerate(self(steps, stand_in=False)):
            yield step

    def _check(self, found: dict[int, int], with_data: list[int], step: int) -> None:
        """Raise the same error on all ranks, if the exchanged numbers require one."""
        nothing = [rank for rank in sorted(found) if found[rank] == _NOTHING]
        error: Exception | None = None
        if self._throw_early and len(with_data) < len(found):
            without = [rank for rank in sorted(found) if rank not in with_data]
            error = AgreementError(
                f"in step {step} of {_LOOP}, {ranks_in_words(without)} had no batch left while "
                f"{ranks_in_words(with_data)} had one: throw_on_early_termination=True ends the loop there"
            )
        elif nothing:
            error = UsageError(
                f"{_LOOP}: {ranks_in_words(nothing)} had no batch at all, so nothing can stand in while the other "
                "ranks continue. Give each rank at least one batch, or pass one of the same form on every rank: "
                "joined(batches, stand_in=batch)"
            )
        if error is not None:
            self._end()
            raise error

    def _end(self) -> None:
        self._looping = False
        self._model.backwards.weight = 1.0
        self.has_data = True
