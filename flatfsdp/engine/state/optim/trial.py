"""The state of an optimizer before its first step.

[Note: trial step] A copy of the optimizer steps on stand-ins: parameters of zeros, with gradients of zeros. Of each
value of its state the first one assigned is kept: if an optimizer creates its state before it computes, as most do,
that is the state before the step (a step count of zero, moments of zero). Values that it assigns after it has computed
are the state of one step without gradients (SGD's momentum: zero). A state that begins as a copy of its parameter (an
average, schedule-free's z) is found by a second trial, on the parameters' values, which torch's optimizers do not need.
Neither the optimizer nor the parameters take part, nor do hooks of the optimizer, a scheduler that counts its steps, or
the random states of torch and Python.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import MutableMapping, Sequence
from typing import Any

import torch
from torch import nn

from ...agreement.once_per_job import warn_once_per_job
from ...guards.optimizer_hooks import wholes_of
from .descriptions import value_of
from .optimizer_clone import copy_over, step_alone
from .param_map import Key, OptimizedParam


class _FirstValues(dict[Any, Any]):
    """One parameter's state, which records first assignments. `first`: these, by the name of the state."""

    def __init__(self) -> None:
        super().__init__()
        self.first: dict[Any, Any] = {}

    def __setitem__(self, key: Any, value: Any) -> None:
        if key not in self.first:
            self.first[key] = _copy_of(value)
        super().__setitem__(key, value)

    # dict's own methods do not call __setitem__.
    setdefault: Any = MutableMapping.setdefault
    update: Any = MutableMapping.update


class _States(defaultdict[Any, Any]):
    """An optimizer's state whose entries record first assignments."""

    def __init__(self) -> None:
        super().__init__(_FirstValues)

    def __setitem__(self, key: Any, value: Any) -> None:
        if isinstance(value, dict) and not isinstance(value, _FirstValues):
            remembering = _FirstValues()
            remembering.update(value)
            value = remembering
        super().__setitem__(key, value)


def state_before_first_step(
    optimizer: torch.optim.Optimizer, groups: Sequence[Sequence[OptimizedParam]]
) -> dict[Key, dict[str, Any]]:
    """The state of each parameter that requires a gradient, by its key. No communication except the optimizer's own.

    Temporarily takes the memory of the parameters, their gradients and the state once more. An optimizer that cannot
    step on gradients of zeros (one that needs a closure, or sparse gradients), or that cannot be copied, is left
    without state, with a warning.
    """
    params = [param for group in groups for param in group]
    known: dict[Key, dict[str, Any]] = {}
    if (wholes := wholes_of(optimizer)) is not None:
        trained = [param for param in params if param.parameter.requires_grad]
        found = {param.key: wholes.state_before_first_step(param.parameter) for param in trained}
        known = {key: state for key, state in found.items() if state is not None}
    # Of parameters without elements here there are no states, and a step on them may divide by zero, as Adafactor's.
    left = [param for param in params if param.key not in known and param.reports]
    if not left:
        return known
    of_trial = _state_of_trial(optimizer, params, left, on_values=False)
    if of_trial and not type(optimizer).__module__.startswith("torch.optim."):
        on_values = _state_of_trial(optimizer, params, left, on_values=True)
        for param in left:
            began = on_values.get(param.key, {})
            copies = {name: value for name, value in began.items() if _is_copy(value, param)}
            of_trial.get(param.key, {}).update(copies)
    return known | of_trial


def _is_copy(value: Any, param: OptimizedParam) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and torch.equal(value, param.at_rest.to(value))


def _state_of_trial(
    optimizer: torch.optim.Optimizer,
    params: Sequence[OptimizedParam],
    stepped: Sequence[OptimizedParam],
    *,
    on_values: bool,
) -> dict[Key, dict[str, Any]]:
    keys = {param.key for param in stepped}
    stand_ins = {id(p.parameter): _stand_in(p, steps=p.key in keys, on_values=on_values) for p in params}
    found = trial_step(optimizer, stand_ins)
    states = {param.key: found.get(id(param.parameter)) for param in stepped}
    return {key: state for key, state in states.items() if state}


def trial_step(optimizer: torch.optim.Optimizer, stand_ins: dict[int, nn.Parameter]) -> dict[int, dict[str, Any]]:
    """The state that a step of a copy of `optimizer` makes of `stand_ins` for its parameters, by the ids of these, as
    it was first assigned. [Note: trial step]"""
    states = _States()
    try:
        step_alone(copy_over(optimizer, stand_ins, states))
    except Exception as error:
        warn_once_per_job(
            f"the state that {type(optimizer).__name__} has before its first step cannot be determined, because a "
            f"copy of it does not step on zeros ({type(error).__name__}: {error}). Its state dict has no state; call "
            "it after a step"
        )
        return {}
    return {key: states[stand_in].first for key, stand_in in stand_ins.items() if states.get(stand_in)}


def _stand_in(param: OptimizedParam, *, steps: bool, on_values: bool) -> nn.Parameter:
    at_rest, steps = param.at_rest, steps and param.parameter.requires_grad
    if steps:
        values = at_rest.clone() if on_values else torch.zeros_like(at_rest)
    else:
        values = at_rest.new_zeros(()).expand(at_rest.shape)
    made = nn.Parameter(values, requires_grad=steps)
    for name, value in vars(param.parameter).items():
        if name != "_handle_ref":
            setattr(made, name, value)
    if steps:
        made.grad = torch.zeros_like(made)
    return made


def _copy_of(value: Any) -> Any:
    try:
        return value_of(value)
    except Exception:
        return value
