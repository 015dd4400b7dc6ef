"""Optimizers that step while a backward goes on: a unit as soon as its gradients are reduced, which are freed then.

[Note: stepping] A step cannot be undone, and nothing of the same backward may read or add to what was stepped. So a
unit steps inside of a backward where that is known ([Note: slot sharing] says how), and at its end elsewhere: in the
first backward, and where parameters are tied or units called again. Either way the optimizer finds what it would find
after the backward, and computes the same numbers.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from ...errors import UsageError, fail, few
from ..agreement.once_per_job import warn_once_per_job
from ..base import _torch
from ..base.events import Observer
from ..flat.states import STEPPED
from ..flat.views import SHOWS_SHARD
from ..runtime.finish import Finished, Finisher
from ..runtime.optimizer_hooks import engine_steps
from ..runtime.unit import Unit

if TYPE_CHECKING:
    from ..runtime.model import Root

_scaled = -1  # the last graph task that began with a scaled loss


def note_scaled_loss() -> None:
    """The backward that runs is that of a loss that was scaled."""
    global _scaled
    _scaled = _torch.graph_task()


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
            with engine_steps(self.optimizer):
                self.optimizer.step()
        finally:
            for group, params in zip(groups, everything, strict=True):
                group["params"] = params
            self.optimizer.param_groups = groups
        for members in chosen:
            for parameter in members:
                parameter.grad = None


class BackwardOptimizers(Observer):
    """The optimizers of one model that step in its backwards; attached to the model as long as there are any.

    Attributes:
        all: also those that are paused.
    """

    requested_by = "optimizer_in_backward()"

    def __init__(self, *optimizers: BackwardOptimizer) -> None:
        self.all = optimizers

    @property
    def active(self) -> tuple[BackwardOptimizer, ...]:
        """Those that step now."""
        return tuple([each for each in self.all if not each.paused])

    @property
    def description(self) -> str:
        """Who steps."""
        return " and ".join(f"{each.name} steps in backwards" for each in self.active)

    def finisher(self, model: Root, *, sync: bool) -> StepInBackward | None:
        """What steps in the backward that begins, if anybody does."""
        return StepInBackward(model, self.active, sync=sync) if self.active else None

    def backward_reaches(self) -> None:
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


def optimizers_of(root: Root) -> BackwardOptimizers:
    """The optimizers that step in backwards of `root`; with none, where there are none."""
    found = (each for each in root.observers.all if isinstance(each, BackwardOptimizers))
    return next(found, BackwardOptimizers())


def set_optimizers(root: Root, optimizers: Sequence[BackwardOptimizer]) -> None:
    """Let these step in backwards of `root`, and no others."""
    root.observers.remove(optimizers_of(root))
    if optimizers:
        root.observers.add(BackwardOptimizers(*optimizers))
    root.options_changed()


class StepInBackward(Finisher):
    """Steps on reduced gradients: what was stepped on has the phase `STEPPED` for the rest of its backward."""

    acts_early = True

    def __init__(self, model: Root, optimizers: Sequence[BackwardOptimizer], *, sync: bool) -> None:
        """`sync`: whether the backward has units that reduce."""
        self._optimizers = optimizers
        self._sync = sync
        self._streams = model.resources.streams
        self._observers, self._accumulators = model.observers, model.accumulators
        # Whatever this backward still shows: late gradients come late. Units of branches come in any order.
        self._come_once = frozenset(
            unit for unit in model.record.anchored if unit.single_use and unit.options.schedule.branch is None
        )
        self._stepped: dict[Unit, None] = {}

    def reduced(self, units: Iterable[Unit]) -> None:
        """Steps on those of which an earlier backward has shown that their gradients come once."""
        for unit in units:
            if unit in self._come_once and unit not in self._stepped:
                self._step(unit)
                if unit in self._stepped:
                    unit.enter_phase(STEPPED)

    def backward_ended(self, units: Iterable[Unit], under_way: Sequence[Unit]) -> Finished:
        """Steps on the others, and on what earlier backwards left, to which this one adds none."""
        for unit in units:
            if unit not in self._stepped:
                self._step(unit, earlier=self._sync and unit.completes)
        return []  # whose hooks ran before the steps

    def _step(self, unit: Unit, *, earlier: bool = False) -> None:
        """Make the reduced gradients of `unit` a step, if they are complete; `earlier`: and those that were there.

        Postcondition: what its leaves show is as it was.
        """
        self._streams.await_downloads()
        for observe in self._observers.reduced:
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
            self._stepped[unit] = None
            unit.record_event("step")
            unit.run_user_hooks(complete)
            self._accumulators.run(complete)
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

    def backward_failed(self, units: Sequence[Unit]) -> None:
        """Steps cannot be undone: warns of those that were taken."""
        if self._stepped:
            labels = [unit.label for unit in units if unit in self._stepped]
            rest = [unit.label for unit in units if unit not in self._stepped]
            warn_once_per_job(
                f"a backward failed after the optimizer had stepped {len(labels)} of {len(units)} units "
                f"({few(labels)}); a step cannot be undone. The others ({few(rest) or 'none'}) have the parameters and "
                "the optimizer state of the step before. Load a checkpoint to have all of them of one step, or go on "
                "with the next batch",
                names_rank=True,
            )
