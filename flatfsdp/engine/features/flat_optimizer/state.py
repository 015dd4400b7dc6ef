"""Adjacent parameters of a shard as one parameter, and views of its optimizer state for them. [Note: flat steps]"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from types import NoneType
from typing import Any

import torch
from torch import nn

from ....errors import UsageError
from ...base import _dtensor
from ...flat.faces import assign_grad
from ...flat.flat_param import FlatParamHandle
from ...layout.layout import Span

State = dict[str, Any]  # of one parameter
States = dict[Any, State]  # of an optimizer

PLAIN = (NoneType, bool, int, float, str)  # immutable: several states may hold the same object


def is_number(value: object) -> bool:
    """Whether `value` is a 0-dim tensor: one number for a whole parameter."""
    return isinstance(value, torch.Tensor) and value.dim() == 0


@dataclass(frozen=True, slots=True, eq=False)
class PublishedState:
    """One parameter's published state: `view` is a view of `flat` from element `start` on."""

    view: torch.Tensor
    flat: torch.Tensor
    start: int


Pieces = dict[int, dict[str, PublishedState]]  # by id of the parameter and name of the state


@dataclass(frozen=True, slots=True, eq=False)
class FusableParam:
    """A parameter that may be part of a run: it occupies `span` of a shard, and has a gradient."""

    parameter: nn.Parameter
    group: int
    handle: FlatParamHandle
    index: int
    span: Span
    grad: torch.Tensor
    state: State


class FusedRun:
    """Adjacent parameters of a shard as one.

    Attributes:
        parameter: a flat view of the shard, padding between the members included.
        members: the parameters in this view, in order, and then those without elements on this rank.
        face, indices: the face of their handle, and their numbers in it.
        spread: whether they are DTensors; lying: how many have elements here; starts: the first element of each.
        group: the number of their param group.
        state: the optimizer's state of `parameter`.
    """

    def __init__(self, found: Sequence[FusableParam]) -> None:
        """`found` are adjacent in the shard; those without elements come last."""
        handle, spans = found[0].handle, [each.span for each in found]
        self.lying = sum(not span.is_empty for span in spans)
        start = spans[0].start
        numel = spans[self.lying - 1].stop - start if self.lying else 0
        self.parameter = nn.Parameter(handle.shard.narrow(0, start, numel))
        self.members = [each.parameter for each in found]
        self.starts = [span.start - start if number < self.lying else 0 for number, span in enumerate(spans)]
        self.group = found[0].group
        self.state: State = {}
        self.face, self._spans, self.indices = handle.face, spans, [each.index for each in found]
        self.spread = handle.face.is_distributed
        self._published: State = {}

    def is_shaped(self, value: Any) -> bool:
        """Whether `value` has one element per element of the run."""
        return isinstance(value, torch.Tensor) and value.shape == self.parameter.shape

    def views_of(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The members' parts of `flat`, as the members have their states."""
        places = zip(self.members, self.indices, self._spans, self.starts, strict=True)
        if self.spread:
            like = self.face.like_holder
            return [like((index,), flat.narrow(0, start, span.numel)) for _, index, span, start in places]
        offset = flat.storage_offset()
        return [flat.as_strided(each.shape, each.stride(), offset + start) for each, _, _, start in places]

    def show_gradient(self) -> None:
        """Set `parameter.grad` to a view of the memory of the members' gradients."""
        shown = self.members[0].grad
        assert shown is not None
        grad = self.face.local_of(shown)
        assign_grad(self.parameter, grad.as_strided(self.parameter.shape, (1,), grad.storage_offset()))

    def adopt(self, states: States, pieces: Pieces) -> None:
        """Take over the members' states, which are alike; those that are not adjacent as the members are copied."""
        for name, value in states.get(self.members[0], {}).items():
            if not isinstance(value, torch.Tensor):
                self.state[name] = value
            elif is_number(value):
                self.state[name] = value.clone()
            else:
                flat = self._lying(name, pieces)
                self.state[name] = flat if flat is not None else self._gathered(name, states, pieces)
            self._published[name] = self.state[name]

    def _lying(self, name: str, pieces: Pieces) -> torch.Tensor | None:
        """The flat state of which the members' pieces are views, at the members' distances; None if there is none."""
        found = [pieces.get(id(each), {}).get(name) for each in self.members]
        first = found[0]
        if first is None:
            return None
        for piece, start in zip(found[: self.lying], self.starts, strict=False):
            if piece is None or piece.flat is not first.flat or piece.start != first.start + start:
                return None
        return first.flat.narrow(0, first.start, self.parameter.numel())

    def _gathered(self, name: str, states: States, pieces: Pieces) -> torch.Tensor:
        values = _dtensor.locals_of(states[each][name] for each in self.members)
        flat = values[0].new_zeros(self.parameter.shape)
        for view, value in zip(_dtensor.locals_of(self.views_of(flat)), values, strict=True):
            view.copy_(value)
        del values, value
        self._show(name, flat, states, pieces)
        return flat

    def check_divisible(self) -> None:
        """Check that the state after the step can be divided into members' states.

        Raises:
            UsageError: a value is neither a number nor a tensor with one element per element of the run.
        """
        for name, value in self.state.items():
            if not (isinstance(value, PLAIN) or self.is_shaped(value) or is_number(value)):
                reported = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
                raise UsageError(
                    f"fuse_optimizer_steps(): the optimizer keeps {name!r} ({reported}) for {self.parameter.numel()} "
                    f"elements of {len(self.members)} parameters; expected a number, or a tensor with one element for "
                    "each of them. It cannot step on several parameters at once: do not use fuse_optimizer_steps() "
                    "with it"
                )

    def publish(self, states: States, pieces: Pieces) -> None:
        """Update the members' `states` with those that the step has replaced in the run's; `StepCounts` publish 0-dim
        tensors after it."""
        for name, value in self.state.items():
            if name in self._published and value is self._published[name]:
                continue
            if self.is_shaped(value):
                self._show(name, value, states, pieces)
            else:
                for each in self.members:
                    states[each][name] = value
            self._published[name] = value
        for name in self._published.keys() - self.state.keys():
            del self._published[name]
            for each in self.members:
                states[each].pop(name, None)

    def _show(self, name: str, flat: torch.Tensor, states: States, pieces: Pieces) -> None:
        for each, view, start in zip(self.members, self.views_of(flat), self.starts, strict=True):
            states[each][name] = view
            pieces.setdefault(id(each), {})[name] = PublishedState(view, flat, start)


class StepCounts:
    """One 0-dim state of runs, for each member: elements of one tensor, since each may be changed separately.

    Attributes:
        tensor: 1-D, an element for each member of each run.
    """

    def __init__(self, name: str, runs: Sequence[FusedRun], states: States) -> None:
        self._name = name
        self._runs = runs
        of_first: torch.Tensor = runs[0].state[name]
        owning_units = [number for number, run in enumerate(runs) for _ in run.members]
        self._owners = torch.tensor(owning_units, device=of_first.device)
        self.tensor = of_first.new_empty(len(owning_units))
        members = chain.from_iterable(run.members for run in runs)
        for each, element in zip(members, self.tensor.unbind(), strict=True):
            states[each][name] = element

    def publish(self) -> None:
        """Copy the values of the runs to the members' elements."""
        self.tensor.copy_(torch.stack([run.state[self._name] for run in self._runs])[self._owners])
