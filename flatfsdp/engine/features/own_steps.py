"""Steps of an optimizer's own class on whole matrices, which owners have for the time of a step.

[Note: own steps] An owner gets matrices with their gradients, and a stand-in of the optimizer takes a step of the class
on them: on the shapes, gradients and states of one process, so that it computes the same numbers. The state of a matrix
is in `optimizer.state` of its owner, and nowhere else ([Note: states of matrices]). Parameters travel with gradients
although an owner could keep a copy: a program may write to its shards in any way, of which versions show only some, and
an owner with an old copy would silently undo it.
"""

from __future__ import annotations

import random
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ...errors import UsageError
from ..guards.optimizer_hooks import OfOptimizer
from ..layout.layout import Span
from ..state.optim.descriptions import KeptWhole
from ..state.optim.optimizer_clone import clone_over, unhooked_step
from ..state.optim.trial import trial_step
from .matrix_exchange import OF_ALL, Entry, Slot, Whole
from .matrix_states import form_of, keep_whole, whole_state

State = dict[str, Any]


class OwnSteps(OfOptimizer):
    """The steps of an optimizer's class on whole matrices: a `Work`.

    Attributes:
        changes, of_groups: what steps on matrices have changed of the optimizer, and of each param group. Each bucket
            begins with the settings from before the step, and sets the same numbers in a group: one that follows from
            all parameters would be another one for each bucket and rank.
    """

    sent = 2
    in_parts = False

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer)
        self.changes: State = {}
        self.of_groups: list[State] = []
        self._has_stepped = False

    @property
    def settings(self) -> list[str]:
        """The numbers that steps have set in each param group, the same on all ranks that have matrices of it."""
        numbers = [{name: _number_in(value) for name, value in each.items()} for each in self.of_groups]
        return [
            ", ".join(f"{name!r} = {number}" for name, number in sorted(each.items()) if number is not None)
            for each in numbers
        ]

    def dtype_of(self, slot: Slot) -> torch.dtype:
        """That of the parameter."""
        return slot.parameter.dtype

    def state_of(self, entry: Entry) -> int:
        """`form_of` its state."""
        return form_of(self.optimizer.state, entry)

    def prepare(self, entries: Sequence[Entry]) -> None:
        """Nothing: states are made by the class."""

    def begin(self, entry: Entry, span: Span) -> Sequence[torch.Tensor]:
        """Gradient and parameter, in place."""
        return entry.within(entry.slot.gradient(), span), entry.within(entry.slot.own(), span)

    def compute(self, wholes: Sequence[Whole]) -> Sequence[torch.Tensor]:
        """Step on these matrices; the results are the parameters."""
        optimizer = self.optimizer
        params: list[list[nn.Parameter]] = [[] for _ in optimizer.param_groups]
        stand_ins = []
        for entry, (gradient, values) in wholes:
            made = nn.Parameter(entry.seen.view(values))
            made.grad = entry.seen.view(gradient)
            params[entry.slot.group].append(made)
            stand_ins.append((entry, made))
        stepping = clone_over(optimizer, params)
        state: dict[Any, State] = {made: whole_state(optimizer.state, entry) for entry, made in stand_ins}
        stepping.state = defaultdict(dict, state)
        stepping.state |= {key: value for key, value in optimizer.state.items() if not isinstance(key, torch.Tensor)}
        stepping.param_groups = [group for group in stepping.param_groups if group["params"]]
        numbers = [number for number, each in enumerate(params) if each]
        attributes, settings = dict(vars(stepping)), [dict(group) for group in stepping.param_groups]
        shared = _shared(stepping)
        before = {name: _fact(value) for name, value in shared.items()}
        device = wholes[0].numbers[0].device
        drawn = None if self._has_stepped else _global_generators(device)  # once: other threads may draw, too
        unhooked_step(stepping)
        self._has_stepped = True
        if drawn is not None and drawn != _global_generators(device):
            raise UsageError(
                f"matrix_steps: a step of this {type(stepping).__name__} draws random numbers of torch, Python or "
                "numpy, which differ between ranks and between replicas. Use settings of it without random numbers"
            )
        if written := [name for name, value in shared.items() if _differs(before[name], _fact(value))]:
            raise UsageError(
                f"matrix_steps: a step of this {type(stepping).__name__} changes {written[0]} in place, which all "
                "parameters share. It would be changed once for each bucket of matrices, and differently on each rank. "
                "Use settings of the optimizer without it, or an optimizer that keeps it for each parameter"
            )
        for number, used, given in zip(numbers, stepping.param_groups, settings, strict=True):
            add_changes(self.of_groups[number], changed(used, given))
        self.changes.update(changed(vars(stepping), attributes))
        for entry, made in stand_ins:
            keep_whole(optimizer.state, entry, stepping.state.pop(made, {}))
        optimizer.state.update(stepping.state)  # what it keeps for no parameter
        return [_result(whole, made) for whole, (_, made) in zip(wholes, stand_ins, strict=True)]

    def unchanged(self, whole: Whole) -> torch.Tensor:
        """The parameter."""
        return whole.numbers[1]

    def end(self, entry: Entry, span: Span, result: torch.Tensor) -> None:
        """Set this rank's elements of the parameter."""
        own = entry.within(entry.slot.own(), span)
        if own.data_ptr() != result.data_ptr():  # a matrix that is not cut is stepped on in place
            own.copy_(result)

    def state_before_first_step(self, entries: Sequence[Entry]) -> State:
        """This rank's part of the state, from a trial on one matrix of zeros; {} if it is different for each matrix of
        the parameter. [Note: trial step]"""
        slot, seen = entries[0].slot, entries[0].seen
        like, own = (
            slot.handle.at_rest.views[slot.index],
            slot.handle.layout.span_in_param(slot.index, slot.handle.rank),
        )
        nothing = like.new_zeros(())
        params = [each for group in self.optimizer.param_groups for each in group["params"]]
        stand_ins = {id(each): nn.Parameter(nothing, requires_grad=False) for each in params}
        made = stand_ins[id(slot.parameter)] = nn.Parameter(seen.view(like.new_zeros(seen.span.numel)))
        made.grad = torch.zeros_like(made)
        found: State = {}
        for name, value in trial_step(self.optimizer, stand_ins).get(id(slot.parameter), {}).items():
            if not isinstance(value, torch.Tensor) or not value.dim():
                found[name] = value
            elif tuple(value.shape) == seen.shape:
                whole = seen.flat(value)
                piece = torch.empty(own.numel, dtype=value.dtype, device=like.device)
                for each in (entry.seen.span for entry in entries):
                    if not (part := own.intersect(each)).is_empty:
                        piece[part.shift(-own.start).slice].copy_(whole[part.shift(-each.start).slice])
                found[name] = piece.as_strided(like.shape, like.stride())
            elif len(entries) > 1:
                return {}
            else:
                found[name] = value.as_subclass(KeptWhole)
        return found


def changed(found: Mapping[str, Any], given: Mapping[str, Any]) -> State:
    """The items of `found` that are other objects in `given`."""
    return {name: value for name, value in found.items() if name not in given or value is not given[name]}


def add_changes(found: State, new: State) -> None:
    """Add the values that a step on some parameters of a group has set in it to those `found` of a step on others.

    Raises:
        UsageError: their numbers differ.
    """
    for name, value in new.items():
        if name in found and _number_in(found[name]) != _number_in(value):
            one, other = _number_in(found[name]), _number_in(value)
            raise UsageError(f"matrix_steps: {name!r} is {one} after some matrices, and {other} after others. {OF_ALL}")
    found.update(new)


def _number_in(value: Any) -> str | None:
    """A number for comparison; None if it is none."""
    if isinstance(value, torch.Tensor):
        return repr(value.item()) if value.numel() == 1 else None
    return repr(value) if isinstance(value, (bool, int, float, complex)) else None


def _result(whole: Whole, made: nn.Parameter) -> torch.Tensor:
    """The elements of a matrix after a step on `made`: in the memory that it was given, unless the optimizer has
    assigned other memory to it."""
    (slot, seen), (_, values) = whole
    if made.shape != seen.shape or made.dtype != values.dtype:
        raise UsageError(
            f"matrix_steps: a step made {slot.name} a tensor of shape {tuple(made.shape)} and {made.dtype}; it was of "
            f"{tuple(seen.shape)} and {values.dtype}"
        )
    return values if made.data_ptr() == values.data_ptr() else seen.flat(made)


def _shared(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The values of an optimizer that belong to no parameter, by words for each."""
    own = {f"its attribute {name!r}": value for name, value in vars(optimizer).items() if name not in _OF_PARAMETERS}
    for group in optimizer.param_groups:
        own |= {f"{name!r} of a param group": value for name, value in group.items() if name != "params"}
    return own | {f"its state {key!r}": each for key, each in optimizer.state.items() if isinstance(key, str)}


def _global_generators(device: torch.device) -> list[Any]:
    """The states of the generators of random numbers that everything in the process shares, also that of `device`."""
    found: list[Any] = [_fact(torch.default_generator)]
    if device.type != "cpu":
        found.append(torch.get_device_module(device).get_rng_state(device).tolist())
    if (numpy := sys.modules.get("numpy")) is not None:
        _, key, *rest = numpy.random.get_state()
        found += [key.tobytes(), rest]
    return [*found, random.getstate()]


_OF_PARAMETERS = frozenset({"state", "param_groups", "defaults"})
_DEPTH = 4


def _fact(value: Any, depth: int = 0) -> Any:
    """A value to compare with that after a step: of numbers, versions of tensors and random states in `value`."""
    if isinstance(value, torch.Tensor):
        return None if value.is_inference() else value._version
    if isinstance(value, torch.Generator):
        return bytes(value.get_state().tolist())
    if isinstance(value, random.Random):
        return value.getstate()
    if hasattr(value, "bit_generator"):  # numpy's
        return repr(value.bit_generator.state)
    if value is None or isinstance(value, (bool, int, float, complex, str)):
        return value
    if depth == _DEPTH or callable(value):
        return None
    if isinstance(value, Mapping):
        return {key: _fact(each, depth + 1) for key, each in value.items() if isinstance(key, (str, int))}
    if isinstance(value, (list, tuple)):
        return [_fact(each, depth + 1) for each in value]
    return {name: _fact(each, depth + 1) for name, each in getattr(value, "__dict__", {}).items()}


def _differs(before: Any, after: Any) -> bool:
    """Whether anything is no longer as it was. Entries that came are no change: caches have those."""
    if isinstance(before, dict) and isinstance(after, dict):
        return any(key not in after or _differs(each, after[key]) for key, each in before.items())
    if isinstance(before, list) and isinstance(after, list):
        return len(before) != len(after) or any(map(_differs, before, after))
    return bool(before != after)
