"""Optimizers that step while a backward goes on: a unit as soon as its gradients are reduced, which are freed then.

[Note: stepping] A step cannot be undone, and nothing of the same backward may read or add to what was stepped. So a
unit steps inside of a backward where that is known ([Note: slot sharing] says how), and at its end elsewhere: in the
first backward, and where parameters are tied or units called again. Either way the optimizer finds what it would find
after the backward, and computes the same numbers.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from ...errors import UsageError, fail, few
from ..agreement.once_per_job import warn_once_per_job
from ..base import _torch
from ..flat.views import SHOWS_SHARD
from .unit import Unit

_at_work: torch.optim.Optimizer | None = None
_scaled = -1  # the last graph task that began with a scaled loss


def is_at_work(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is the engine that steps `optimizer`, in a backward."""
    return optimizer is _at_work


def note_scaled_loss() -> None:
    """The backward that runs is that of a loss that was scaled."""
    global _scaled
    _scaled = _torch.graph_task()


@contextmanager
def _working(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    global _at_work
    _at_work = optimizer
    try:
        yield
    finally:
        _at_work = None


class BackwardOptimizer:
    """An optimizer that steps on some of its parameters at a time.

    Attributes:
        optimizer: whose `param_groups` list, while it steps, only what it steps on.
        paused: whether it leaves gradients alone for now.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.paused = False
        self._sizes: list[int] = []  # of the param groups when `_positions` was made
        self._positions: dict[int, int] = {}  # the number of its group, by id of the parameter

    @property
    def name(self) -> str:
        """Of the optimizer, for messages."""
        return type(self.optimizer).__name__

    def step(self, parameters: Iterable[nn.Parameter]) -> None:
        """Step on those of `parameters` that it holds and that have a gradient, and free that."""
        groups = self.optimizer.param_groups
        sizes = [len(group["params"]) for group in groups]
        if sizes != self._sizes:
            self._sizes = sizes
            self._positions = {id(each): number for number, group in enumerate(groups) for each in group["params"]}
        chosen: list[list[nn.Parameter]] = [[] for _ in groups]
        for parameter in parameters:
            number = self._positions.get(id(parameter))
            if number is not None and parameter.grad is not None:
                chosen[number].append(parameter)
        if not any(chosen):
            return
        everything = [group["params"] for group in groups]
        try:
            for group, members in zip(groups, chosen, strict=True):
                group["params"] = members
            self.optimizer.param_groups = [group for group in groups if group["params"]]
            with _working(self.optimizer):
                self.optimizer.step()
        finally:
            for group, params in zip(groups, everything, strict=True):
                group["params"] = params
            self.optimizer.param_groups = groups
        for members in chosen:
            for parameter in members:
                parameter.grad = None


class BackwardOptimizers:
    """The optimizers of one model that step in its backwards.

    Attributes:
        all: also those that are paused.
    """

    def __init__(self) -> None:
        self.all: list[BackwardOptimizer] = []

    @property
    def active(self) -> tuple[BackwardOptimizer, ...]:
        """Those that step now."""
        return tuple([each for each in self.all if not each.paused])

    @property
    def description(self) -> str:
        """What ranks must have in common, in words; "" for none."""
        return " and ".join(f"{each.name} steps in backwards" for each in self.active)

    def check_backward(self) -> None:
        """Refuse a backward, which runs now, that nobody can step in."""
        if not self.active:
            return
        if torch.is_grad_enabled():
            problem = (
                "this one has create_graph=True: its gradients will be differentiated, and are not final when it ends"
            )
        elif _torch.graph_task() == _scaled:
            problem = (
                "this one is of a loss that ShardedGradScaler has scaled: whether a gradient overflowed is known only "
                "when all are there. Train in bfloat16, which needs no scaler"
            )
        else:
            return
        fail(
            UsageError(
                f"{self.active[0].name} steps in backwards, and {problem}. Or step after the backward: "
                "call remove() of what optimizer_in_backward() returned, or use its no_step()"
            )
        )


class BackwardSteps:
    """The steps of one backward.

    Attributes:
        stepped: the units that were stepped; nothing may touch them again in this backward.
    """

    def __init__(self, optimizers: Sequence[BackwardOptimizer], units: Iterable[Unit]) -> None:
        """`units` take part in the backward. Falsy without `optimizers`."""
        self._optimizers = optimizers
        # Whatever this backward still shows: late gradients come late. Units of branches come in any order.
        known = [unit for unit in units if unit.single_use and unit.options.schedule.branch is None]
        self._known = frozenset(known) if optimizers else frozenset()
        self.stepped: dict[Unit, None] = {}

    def __bool__(self) -> bool:
        return bool(self._optimizers)

    def knows(self, unit: Unit) -> bool:
        """Whether an earlier backward has shown that gradients of `unit` come once."""
        return unit in self._known

    def step(self, unit: Unit, *, earlier: bool = False) -> None:
        """Make the reduced gradients of `unit` a step, if they are complete and were not that before. `earlier`: and
        those that earlier backwards left, to which this one adds none.

        Postcondition: what its leaves show is as it was.
        """
        if unit in self.stepped:
            return
        root = unit.root
        root.resources.streams.await_downloads()
        for observe in root.observers.reduced:
            observe(unit)
        modes = [views.mode for views in unit.views]
        for views in unit.views:
            views.show(SHOWS_SHARD)
        complete = unit.finalize_grads()
        handles = complete
        if earlier:
            has_gradient = (any(each.grad is not None for each in handle.steppable) for handle in unit.handles)
            handles = [*itertools.compress(unit.handles, has_gradient)]
        if complete:
            self.stepped[unit] = None
            unit.record_event("step")
            unit.run_user_hooks(complete)
            root.accumulators.run(complete)
        if handles:
            parameters = [parameter for handle in handles for parameter in handle.steppable]
            for optimizer in self._optimizers:
                optimizer.step(parameters)
            for handle in handles:
                if handle.is_unsharded_at_rest and not handle.use_orig_params:
                    # The leaves see the write, made through the flat parameter, without having been told.
                    torch.autograd.graph.increment_version(handle.leaves)
        for views, mode in zip(unit.views, modes, strict=True):
            views.show(mode)

    def check_not_stepped(self, unit: Unit, what: str) -> None:
        """Refuse `what` happens to `unit` in this backward if it was stepped already."""
        if unit in self.stepped:
            fail(
                UsageError(
                    f"unit {unit.label}: {what} after its parameters were stepped in the same backward, which no "
                    "backward before did. What this backward computes would mix weights of two steps. Step after the "
                    "backward where a model does this: call remove() of what optimizer_in_backward() returned"
                )
            )

    def warn_of_steps_taken(self, units: Sequence[Unit]) -> None:
        """A backward over `units` failed: which of them were stepped cannot be undone."""
        if self.stepped:
            labels = [unit.label for unit in units if unit in self.stepped]
            rest = [unit.label for unit in units if unit not in self.stepped]
            warn_once_per_job(
                f"a backward failed after the optimizer had stepped {len(labels)} of {len(units)} units "
                f"({few(labels)}); a step cannot be undone. The others ({few(rest) or 'none'}) have the parameters and "
                "the optimizer state of the step before. Load a checkpoint to have all of them of one step, or go on "
                "with the next batch",
                names_rank=True,
            )


NO_STEPPING = BackwardSteps((), ())
