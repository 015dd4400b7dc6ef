"""Optimizers that step during a backward: on each unit as soon as its gradients are reduced, which frees them.

[Note: optimizer in backward] A step cannot be undone, and nothing in the same backward may read the stepped parameters
or add to their gradients. So a unit is stepped inside of a backward if this is known ([Note: slot sharing]), and at the
end of the backward otherwise: in the first one, and if parameters are tied or units are called again. In both cases the
optimizer finds the same gradients as after the backward, and computes the same numbers.
"""

from __future__ import annotations

import copy
import itertools
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ...errors import UsageError, fail, few, refuse_type
from ..agreement.once_per_job import warn_once_per_job
from ..base import _torch
from ..base.events import Observer
from ..flat.states import STEPPED
from ..flat.views import SHOWS_SHARD
from ..guards.optimizer_hooks import check_parameters, compare_at_first_step, engine_steps, wholes_of
from ..models.rest import check_outside, outermost_model
from ..runtime.finish import Finished, Finisher
from ..runtime.model import Model
from ..runtime.unit import Unit
from ..state.optim.descriptions import alike
from ..state.optim.optimizer_clone import copy_over, step_alone

_scaled = -1  # id of the last graph task that began with a scaled loss


def note_scaled_loss() -> None:
    """Record that the running backward is that of a scaled loss."""
    global _scaled
    _scaled = _torch.graph_task()


class BackwardOptimizers(Observer):
    """The optimizers of one model that step in its backwards; an observer of the model while there are any.

    Attributes:
        all: including paused ones.
    """

    requested_by = "optimizer_in_backward()"

    def __init__(self, model: Model, *optimizers: OptimizerInBackward) -> None:
        self.all = optimizers
        self._model = weakref.ref(model)

    @property
    def active(self) -> tuple[torch.optim.Optimizer, ...]:
        """The optimizers that are not paused."""
        return tuple([each.optimizer for each in self.all if not each._paused])

    @property
    def description(self) -> str:
        """The active optimizers, in words."""
        return " and ".join(f"{type(each).__name__} steps during backwards" for each in self.active)

    def finisher(self, *, sync: bool) -> StepInBackward | None:
        """The finisher of the backward that begins; None if no optimizer is active."""
        model, active = self._model(), [each for each in self.all if not each._paused]
        if not active or model is None:
            return None
        for each in active:
            compare_at_first_step(each.optimizer)
        return StepInBackward(model, active, sync=sync)

    def backward_reaches(self) -> None:
        """Raise UsageError for a running backward in which no optimizer can step."""
        if not self.active:
            return
        if torch.is_grad_enabled():
            problem = (
                "this backward has create_graph=True: its gradients will be differentiated and are not final when it "
                "ends"
            )
        elif _torch.graph_task() == _scaled:
            problem = (
                "the loss of this backward was scaled by ShardedGradScaler: whether a gradient has overflowed is "
                "known only when all gradients are computed. Train in bfloat16, which needs no scaler"
            )
        else:
            return
        fail(
            UsageError(
                f"{type(self.active[0]).__name__} steps during backwards, and {problem}. Alternatively, step after "
                "the backward: call remove() of its OptimizerInBackward, or use its no_step()"
            )
        )


def optimizers_of(model: Model) -> BackwardOptimizers:
    """The optimizers that step in backwards of `model`; empty, and not attached, if there are none."""
    return model.observers.find(BackwardOptimizers) or BackwardOptimizers(model)


def _set_optimizers(model: Model, optimizers: Sequence[OptimizerInBackward]) -> None:
    """Let these step in backwards of `model`, and no others."""
    model.observers.remove(optimizers_of(model))
    if optimizers:
        model.observers.add(BackwardOptimizers(model, *optimizers))
    model.setup.options_changed()


class StepInBackward(Finisher):
    """Steps on reduced gradients; a unit that was stepped on has the phase `STEPPED` for the rest of its backward."""

    acts_early = True

    def __init__(self, model: Model, optimizers: Sequence[OptimizerInBackward], *, sync: bool) -> None:
        """`sync`: whether the backward has units that reduce."""
        self._optimizers = optimizers
        self._sync = sync
        self._streams, self._agreement = model.resources.streams, model.agreement
        self._observers = model.observers
        # Settled before this backward shows more: its late gradients come late. Units of branches come in any order.
        iteration = model.iteration
        come_once = frozenset(unit for unit in iteration.record.anchored if unit.leaves.single_use)
        self._come_once = come_once.difference(iteration.turns.conditional)
        self._stepped: dict[Unit, None] = {}

    def reduced(self, units: Iterable[Unit]) -> None:
        """Step on the units of which an earlier backward has shown that their gradients come once."""
        for unit in units:
            if unit in self._come_once and unit not in self._stepped:
                self._step(unit)
                if unit in self._stepped:
                    unit.enter_phase(STEPPED)

    def backward_ended(self, units: Iterable[Unit]) -> Finished:
        """Step on the other units, and on gradients left by earlier backwards, to which this one adds none."""
        for unit in units:
            if unit not in self._stepped:
                self._step(unit, earlier=self._sync and bool(unit.resolved.completes))
        return []  # their hooks ran before the steps

    def _step(self, unit: Unit, *, earlier: bool = False) -> None:
        """Step on the reduced gradients of `unit`, if they are complete; `earlier`: also on earlier gradients.

        Postcondition: the mode of its views is unchanged.
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
            has_gradient = (any(each.grad is not None for each in handle.face.holders) for handle in unit.handles)
            handles = [*itertools.compress(unit.handles, has_gradient)]
        if complete:
            self._stepped[unit] = None
            unit.record_event("step")
            for observe in self._observers.gradients_complete:
                observe([(unit, complete)])
        if handles:
            parameters = [parameter for handle in handles for parameter in handle.face.holders]
            for optimizer in self._optimizers:
                optimizer._step_on(parameters)
            for handle in handles:
                if handle.is_unsharded_at_rest and not handle.face.holders_are_leaves:
                    # The step wrote to the holders; versions of the leaves have to count the write, too.
                    torch.autograd.graph.increment_version(handle.counted)
        for views, mode in zip(unit.views, modes, strict=True):
            views.show(mode)

    def backward_failed(self, units: Sequence[Unit]) -> None:
        """Warn of steps, which cannot be undone."""
        if self._stepped:
            labels = [unit.label for unit in units if unit in self._stepped]
            others = [unit.label for unit in units if unit not in self._stepped]
            warn_once_per_job(
                f"a backward failed after the optimizer had stepped {len(labels)} of {len(units)} units "
                f"({few(labels)}); a step cannot be undone. The other units ({few(others) or 'none'}) still have the "
                "parameters and the optimizer state of the previous step. Load a checkpoint to have all of them at "
                f"the same step{'' if self._agreement.diverged else ', or continue with the next batch'}",
                names_rank=True,
            )


class OptimizerInBackward:
    """Pauses or ends steps in backwards; returned by `optimizer_in_backward`.

    It is constructed only there, and does not keep the model alive.

    Attributes:
        optimizer: as passed; during a step its `param_groups` list only the parameters of this step.
    """

    def __init__(self, model: Model, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self._paused = False  # whether backwards leave gradients in `.grad`
        self._model = weakref.ref(model)
        self._sizes: list[int] = []  # of the param groups when `_positions` was made
        self._positions: dict[int, int] = {}  # the number of its group, by id of the parameter

    @contextmanager
    def no_step(self) -> Iterator[None]:
        """A context whose backwards leave reduced gradients in `.grad`, where they accumulate.

        The next backward outside of it steps on the sums, for the parameters that it computes gradients of;
        `optimizer.step()`, inside or after the context, does so for all. `clip_grad_norm_` and gradient scalers work
        inside. Every rank enters it.

        Raises:
            UsageError: inside a forward or a backward.
        """
        before = self._paused
        self._pause(True)
        try:
            yield
        finally:
            self._pause(before)

    def remove(self) -> None:
        """End steps in backwards: the program calls `optimizer.step()` after the backward again. Every rank calls it.

        Raises:
            UsageError: inside a forward or a backward.
        """
        model = self._model()
        if model is not None and self in optimizers_of(model).all:
            check_outside(model.outermost, "OptimizerInBackward.remove()")
            _set_optimizers(model, [each for each in optimizers_of(model).all if each is not self])

    def _pause(self, paused: bool) -> None:
        model = self._model()
        if model is not None:
            check_outside(model.outermost, "OptimizerInBackward.no_step()")
            self._paused = paused
            model.setup.options_changed()

    def _step_on(self, parameters: Iterable[nn.Parameter]) -> None:
        """Step on those of `parameters` that the optimizer holds and that have a gradient, and free the gradients."""
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


def optimizer_in_backward(model: nn.Module, optimizer: torch.optim.Optimizer) -> OptimizerInBackward:
    """Let `optimizer` step inside of every backward of `model`: on each unit as soon as its gradients are reduced.

    The gradients are freed immediately, so a rank holds the gradients of at most three units at a time instead of those
    of the whole model. This saves half of the memory of its shards with plain SGD, and a quarter with AdamW. Results
    equal those of `optimizer.step()` after the backward; parameters without a gradient are skipped.

    `optimizer` is not changed: its param groups, which schedulers change, its state and its state dicts. Its `step()`
    has nothing to do after a backward, and the program may still call it. Several optimizers may step, each on its own
    parameters. Parameters that are in no unit or in no such optimizer keep their gradients.

    - *When*: a unit is stepped inside the backward once an earlier one has shown that its gradients come once: from the
      second on. In the first, and if parameters are tied, units called several times, recomputed with reentrant
      checkpointing or in `ensure_unit_participation()`, or if this rank's backward does not reach all of its
      parameters, it is stepped at the end of the backward, and the gradients of all such units are kept until then.
    - *Accumulation*: a backward under `no_sync()` or without all-reduce does not step; the next one that reduces steps
      on the sum. Without `no_sync()`, use `no_step()` of the returned object.
    - *Failure*: steps cannot be undone. After a backward that fails, a warning names the units that were stepped.
    - *Refused* with an error: `clip_grad_norm_`, losses scaled by `ShardedGradScaler`, and `create_graph=True`, unless
      under `no_step()`; an optimizer that needs a closure, or counts its steps for all parameters at once. Hooks of the
      optimizer run once per unit.

    Every rank must call it at the same point; the next forward or backward checks this. No communication. Copies and
    pickles of the model step no optimizer.

    Args:
        model: the outermost wrapper.
        optimizer: built on the parameters of `model` after it was wrapped.

    Raises:
        ConfigTypeError: `model` is not a wrapper, or `optimizer` is not a `torch.optim.Optimizer`.
        UsageError: `model` is a nested wrapper; an optimizer that steps in its backwards already holds a parameter of
            this one; an optimizer that cannot step on some of its parameters at a time; inside a forward or a backward.

    Example (in a process group of one rank):
        >>> import torch, flatfsdp
        >>> model = flatfsdp.FullyShardedDataParallel(torch.nn.Linear(2, 1), use_orig_params=True)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> stepping = flatfsdp.optimizer_in_backward(model, optimizer)
        >>> before = model.bias.item()
        >>> model(torch.ones(4, 2)).sum().backward()
        >>> round(before - model.bias.item(), 3), model.bias.grad
        (0.4, None)
    """
    name = "optimizer_in_backward"
    inner = outermost_model(model, name)
    if not isinstance(optimizer, torch.optim.Optimizer):
        refuse_type(f"{name}: optimizer", optimizer, "an optimizer of torch.optim, or a class derived from it")
    check_outside(inner.outermost, f"{name}()")
    if (wholes := wholes_of(optimizer)) is not None and wholes.exchanges:
        raise UsageError(
            f"{name}(): this {type(optimizer).__name__} steps on whole matrices (matrix_steps), for which all ranks "
            "exchange parts; ranks without elements of a unit would not take part. Call its step() after the backward"
        )
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for other in optimizers_of(inner).all:
        taken = {id(parameter) for group in other.optimizer.param_groups for parameter in group["params"]}
        if taken.intersection(map(id, held)):
            raise UsageError(
                f"{name}(): a {type(other.optimizer).__name__} that steps in backwards of this model already holds "
                f"parameters of this {type(optimizer).__name__}. Give each optimizer its own parameters, or call "
                "remove() for the other one"
            )
    check_parameters(optimizer)
    _check_divisible(optimizer)
    made = OptimizerInBackward(inner, optimizer)
    _set_optimizers(inner, [*optimizers_of(inner).all, made])
    return made


def _check_divisible(optimizer: torch.optim.Optimizer) -> None:
    """Raise UsageError if `optimizer` needs all of its parameters in one step: tested by a copy on small tensors."""
    name = type(optimizer).__name__
    stand_ins = {id(p): _stand_in(p) for group in optimizer.param_groups for p in group["params"]}
    try:
        trial = copy_over(optimizer, stand_ins, defaultdict(dict))
        before = _counts(trial)
        step_alone(trial)
    except Exception as error:
        raise UsageError(
            f"optimizer_in_backward(): a copy of this {name} cannot step on some of its parameters "
            f"({type(error).__name__}: {error}). Call its step() after the backward"
        ) from error
    after = _counts(trial)
    changed = [name for name in after if name not in before or not alike(before[name], after[name])]
    changed += [repr(key) for key in trial.state if not isinstance(key, torch.Tensor)]
    if changed:
        raise UsageError(
            f"optimizer_in_backward(): a step of this {name} changes state that is shared by all parameters "
            f"({', '.join(changed)}) and would change it once per unit. Call its step() after the backward"
        )


def _stand_in(parameter: nn.Parameter) -> nn.Parameter:
    zero = torch.zeros((1,) * parameter.dim(), dtype=parameter.dtype, device=parameter.device)
    made = nn.Parameter(zero, requires_grad=parameter.requires_grad)
    if parameter.requires_grad:
        made.grad = torch.zeros_like(made)
    return made


def _counts(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state of an optimizer in addition to that of its parameters: settings of its groups, numeric attributes."""
    found = {
        f"{key} of param group {number}": copy.deepcopy(value)
        for number, group in enumerate(optimizer.param_groups)
        for key, value in group.items()
        if key != "params"
    }
    return found | {name: value for name, value in vars(optimizer).items() if isinstance(value, (int, float))}
