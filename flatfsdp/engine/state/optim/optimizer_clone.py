"""Optimizers of the same class and settings over other parameters: for a step that leaves the original unchanged."""

from __future__ import annotations

import copy
import random
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ....errors import UsageError

_ITS_OWN = frozenset({"state", "param_groups"})
Changes = tuple[dict[str, Any], list[dict[str, Any]]]  # new values of attributes, and of settings by param group


def clone_over(optimizer: torch.optim.Optimizer, params: Sequence[list[nn.Parameter]]) -> torch.optim.Optimizer:
    """`optimizer` over `params`, by param group, without hooks, which a base class's step would run. It shares all
    other attributes with the original, including the state."""
    clone: torch.optim.Optimizer = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        clone.__dict__[name] = OrderedDict() if name.endswith("_hooks") else value
    clone.param_groups = [{**group, "params": each} for group, each in zip(optimizer.param_groups, params, strict=True)]
    return clone


class Settings:
    """The attributes and settings of a clone `made` by `clone_over` before it steps, which its step may replace."""

    def __init__(self, made: torch.optim.Optimizer) -> None:
        self._attributes, self._groups = dict(vars(made)), [dict(group) for group in made.param_groups]

    def changes(self, made: torch.optim.Optimizer) -> Changes:
        """Values that the step has set: other objects than before."""
        of_groups = zip(made.param_groups, self._groups, strict=True)
        return _changed(vars(made), self._attributes), [_changed(used, given) for used, given in of_groups]


def _changed(found: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in found.items() if name not in given or value is not given[name]}


def set_changes(optimizer: torch.optim.Optimizer, changes: Changes) -> None:
    """Set what the step of a clone has changed of `optimizer`, too."""
    vars(optimizer).update(changes[0])
    for group, settings in zip(optimizer.param_groups, changes[1], strict=True):
        group.update(settings)


def copy_over(
    optimizer: torch.optim.Optimizer, stand_ins: dict[int, nn.Parameter], state: Any
) -> torch.optim.Optimizer:
    """`optimizer` over the stand-ins for its parameters, by their ids, with another state, and without hooks. It shares
    nothing that a step could change; uncopyable attributes (a process group, a lock) are shared.

    Raises:
        UsageError: it could step on the real parameters.
    """
    clone: torch.optim.Optimizer = object.__new__(type(optimizer))
    memo: dict[int, Any] = {id(optimizer): clone, **stand_ins}
    for name, value in vars(optimizer).items():
        if name.endswith("_hooks"):
            clone.__dict__[name] = OrderedDict()
        elif name not in _ITS_OWN and not (callable(value) and hasattr(type(optimizer), name)):
            clone.__dict__[name] = _copied(name, value, memo)
    # By attribute, and last: a wrapper around an optimizer passes them on to its copied inner optimizer.
    clone.param_groups = [
        {
            key: [stand_ins[id(each)] for each in value] if key == "params" else copy.deepcopy(value, memo)
            for key, value in group.items()
        }
        for group in optimizer.param_groups
    ]
    clone.state = state
    return clone


def _copied(name: str, value: Any, memo: dict[int, Any]) -> Any:
    if isinstance(value, nn.Module):
        raise UsageError(f"its attribute {name!r} is a module, through which it could change real parameters")
    try:
        return copy.deepcopy(value, memo)
    except Exception as error:
        if hasattr(value, "step"):
            raise UsageError(f"its attribute {name!r}, a {type(value).__name__}, cannot be copied: {error}") from error
        return value


@contextmanager
def random_states_kept(clone: torch.optim.Optimizer) -> Iterator[None]:
    """Inside, `clone` may step: afterwards the random states of torch and Python are as before."""
    devices = {each.device for group in clone.param_groups for each in group["params"] if each.device.type != "cpu"}
    device_type = next(iter(devices)).type if devices else "cpu"
    numbers = random.getstate()
    try:
        with torch.random.fork_rng(devices=sorted(devices, key=str), device_type=device_type):
            yield
    finally:
        random.setstate(numbers)


def step_alone(clone: torch.optim.Optimizer) -> None:
    """`unhooked_step`, with `random_states_kept`."""
    with random_states_kept(clone):
        unhooked_step(clone)


def unhooked_step(clone: torch.optim.Optimizer) -> None:
    """Run the step of the class of `clone`, without torch's wrapper that calls hooks."""
    step: Any = type(clone).step
    while getattr(step, "hooked", False) and hasattr(step, "__wrapped__"):
        step = step.__wrapped__
    step(clone)
