"""An optimizer that steps while the backward goes on, for users. [Note: stepping]"""

from __future__ import annotations

import copy
import weakref
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ...errors import UsageError, refuse_type
from ..runtime.model import Root
from ..runtime.module_tree import outermost_unit
from ..runtime.optimizer_hooks import check_parameters
from ..runtime.rest import check_outside
from ..state.optim.descriptions import alike
from ..state.optim.optimizer_clone import copy_over, step_alone
from .backward_steps import BackwardOptimizer, optimizers_of, set_optimizers


class OptimizerInBackward:
    """The way to pause stepping in backwards, and to end it: what `optimizer_in_backward` returns.

    It is made there, for one `backward_optimizer` of a model's `root`, and does not keep the model alive.

    Attributes:
        optimizer: the one that was given.
    """

    def __init__(self, root: Root, backward_optimizer: BackwardOptimizer) -> None:
        self.optimizer = backward_optimizer.optimizer
        self._root = weakref.ref(root)
        self._backward_optimizer = backward_optimizer

    @contextmanager
    def no_step(self) -> Iterator[None]:
        """A context whose backwards leave reduced gradients in `.grad`, where they add up.

        The next backward outside of it steps on the sum, of what it brings gradients to; so does `optimizer.step()`, of
        everything, inside or after it. Inside, `clip_grad_norm_` and a gradient scaler work as ever. Every rank enters
        it.

        Raises:
            UsageError: inside a forward or a backward.
        """
        before = self._backward_optimizer.paused
        self._pause(True)
        try:
            yield
        finally:
            self._pause(before)

    def remove(self) -> None:
        """From now on `optimizer.step()` is called by the program, after the backward. Every rank calls it.

        Raises:
            UsageError: inside a forward or a backward.
        """
        root = self._root()
        if root is not None and self._backward_optimizer in optimizers_of(root).all:
            check_outside(root.unit, "OptimizerInBackward.remove()")
            set_optimizers(root, [each for each in optimizers_of(root).all if each is not self._backward_optimizer])

    def _pause(self, paused: bool) -> None:
        root = self._root()
        if root is not None:
            check_outside(root.unit, "OptimizerInBackward.no_step()")
            self._backward_optimizer.paused = paused
            root.options_changed()


def optimizer_in_backward(model: nn.Module, optimizer: torch.optim.Optimizer) -> OptimizerInBackward:
    """Let `optimizer` step inside of every backward of `model`: on each unit as soon as its gradients are reduced.

    They are freed right after, so that a rank holds the gradients of no more than three units at a time, and not those
    of the model: with plain SGD half of what it keeps of a model, with AdamW a quarter. Numbers are those of
    `optimizer.step()` after the backward; a parameter that has no gradient then is not stepped here.

    `optimizer` stays what it is: its param groups, which schedulers change, its state and every state dict of it. Its
    `step()` has nothing to do after a backward, and the program may keep calling it. Several optimizers may step, each
    on parameters of its own. What no unit owns, or no such optimizer holds, keeps its gradients.

    - *When*: a unit is stepped inside the backward once an earlier one has shown that its gradients come once: from the
      second on. In the first, and where parameters are tied, units called several times, recomputed with reentrant
      checkpointing or in `ensure_unit_participation()`, and where this rank's backward does not reach all of its
      parameters, it is stepped as the backward ends; gradients of such units are all there until then.
    - *Accumulation*: a backward under `no_sync()` or without all-reduce does not step; the next one that reduces steps
      on the sum. Without `no_sync()`, use `no_step()` of what this returns.
    - *Failure*: steps cannot be undone. After a backward that fails, a warning says which units were stepped.
    - *Refused*, in words: `clip_grad_norm_`, losses scaled by `ShardedGradScaler`, and `create_graph=True`, unless
      under `no_step()`; an optimizer that needs a closure, or counts its steps for all parameters at once. Hooks of the
      optimizer run at every unit.

    Every rank calls it at the same point; the next forward or backward compares that. No communication. Copies and
    pickles of the model step no optimizer.

    Args:
        model: the outermost wrapper.
        optimizer: built on the parameters of `model` after it was wrapped.

    Raises:
        ConfigTypeError: `model` is no wrapper, `optimizer` no `torch.optim.Optimizer`.
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
    unit = outermost_unit(model, name)
    if not isinstance(optimizer, torch.optim.Optimizer):
        refuse_type(f"{name}: optimizer", optimizer, "an optimizer of torch.optim, or a class derived from it")
    root = unit.root
    check_outside(unit, f"{name}()")
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for backward_optimizer in optimizers_of(root).all:
        taken = set(map(id, (p for group in backward_optimizer.optimizer.param_groups for p in group["params"])))
        if taken.intersection(map(id, held)):
            raise UsageError(
                f"{name}(): a {backward_optimizer.name} that steps in backwards of this model already holds parameters "
                f"of this {type(optimizer).__name__}. Give each optimizer parameters of its own, or remove() the other "
                "one"
            )
    check_parameters(optimizer)
    _check_divisible(optimizer)
    backward_optimizer = BackwardOptimizer(optimizer)
    set_optimizers(root, [*optimizers_of(root).all, backward_optimizer])
    return OptimizerInBackward(root, backward_optimizer)


def _check_divisible(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that needs all of its parameters in one step: a copy steps on small stand-ins to tell."""
    kind = type(optimizer).__name__
    stand_ins = {id(p): _stand_in(p) for group in optimizer.param_groups for p in group["params"]}
    try:
        trial = copy_over(optimizer, stand_ins, defaultdict(dict))
        before = _counts(trial)
        step_alone(trial)
    except Exception as error:
        raise UsageError(
            f"optimizer_in_backward(): a copy of this {kind} does not step on some parameters by itself "
            f"({type(error).__name__}: {error}). Call its step() after the backward"
        ) from error
    after = _counts(trial)
    changed = [name for name in after if name not in before or not alike(before[name], after[name])]
    changed += [repr(key) for key in trial.state if not isinstance(key, torch.Tensor)]
    if changed:
        raise UsageError(
            f"optimizer_in_backward(): a step of this {kind} changes what it keeps for all parameters together "
            f"({', '.join(changed)}), and would change it once per unit. Call its step() after the backward"
        )


def _stand_in(parameter: nn.Parameter) -> nn.Parameter:
    zero = torch.zeros((1,) * parameter.dim(), dtype=parameter.dtype, device=parameter.device)
    made = nn.Parameter(zero, requires_grad=parameter.requires_grad)
    if parameter.requires_grad:
        made.grad = torch.zeros_like(made)
    return made


def _counts(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What an optimizer keeps besides its parameters' states: settings of its groups, and numbers of its own."""
    found = {
        f"{key} of param group {number}": copy.deepcopy(value)
        for number, group in enumerate(optimizer.param_groups)
        for key, value in group.items()
        if key != "params"
    }
    return found | {name: value for name, value in vars(optimizer).items() if isinstance(value, (int, float))}
