"""Steps of an optimizer's own class on whole matrices, which owners have for the time of a step.

[Note: own steps] An owner gets matrices with their gradients, and a stand-in of the optimizer takes a step of the class
on them: on the shapes, gradients and states of one process, so that it computes the same numbers. The state of a matrix
is in `optimizer.state` of its owner, and nowhere else ([Note: states of matrices]). Parameters travel with gradients
although an owner could keep a copy: a program may write to its shards in any way, of which versions show only some, and
an owner with an old copy would silently undo it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ...errors import UsageError
from ..flat.layout_views import dense, stored_in_order
from ..layout.layout import Span
from ..state.optim.descriptions import KeptWhole
from ..state.optim.optimizer_clone import clone_over, unhooked_step
from ..state.optim.trial import trial_step
from .matrix_exchange import Entry, Slot, Whole
from .matrix_states import form_of, keep_whole, whole_state

State = dict[str, Any]


class OwnSteps:
    """The steps of an optimizer's class on whole matrices: a `Work`.

    Attributes:
        changes, of_groups: what steps on matrices have changed of the optimizer, and of each param group. Each bucket
            begins with the settings from before the step.
    """

    sent = 2
    in_parts = False

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self.changes: State = {}
        self.of_groups: list[State] = []

    def dtype_of(self, slot: Slot) -> torch.dtype:
        """That of the parameter."""
        return slot.parameter.dtype

    def state_of(self, entry: Entry) -> int:
        """`form_of` its state."""
        return form_of(self._optimizer.state, entry)

    def prepare(self, entries: Sequence[Entry]) -> None:
        """Nothing: states are made by the class."""

    def begin(self, entry: Entry, span: Span) -> Sequence[torch.Tensor]:
        """Gradient and parameter, in place."""
        return entry.within(entry.slot.gradient(), span), entry.within(entry.slot.own(), span)

    def compute(self, wholes: Sequence[Whole]) -> Sequence[torch.Tensor]:
        """Step on these matrices; the results are the parameters."""
        optimizer = self._optimizer
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
        versions = [(name, value, value._version) for name, value in _tensors(settings)]
        unhooked_step(stepping)
        if counted := [name for name, value, version in versions if value._version != version]:
            raise UsageError(
                f"matrix_steps: a step of this {type(stepping).__name__} writes to {counted[0]!r} of a param group, in "
                "place, and would do so for each bucket of matrices. Use a setting of it that is no tensor"
            )
        for number, used, given in zip(numbers, stepping.param_groups, settings, strict=True):
            self.of_groups[number].update(changed(used, given))
        self.changes.update(changed(vars(stepping), attributes))
        for entry, made in stand_ins:
            keep_whole(optimizer.state, entry, stepping.state.pop(made, {}))
        optimizer.state.update(stepping.state)  # what it keeps for no parameter
        return [whole.numbers[1] for whole in wholes]

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
        params = [each for group in self._optimizer.param_groups for each in group["params"]]
        stand_ins = {id(each): nn.Parameter(nothing, requires_grad=False) for each in params}
        made = stand_ins[id(slot.parameter)] = nn.Parameter(seen.view(like.new_zeros(seen.span.numel)))
        made.grad = torch.zeros_like(made)
        found: State = {}
        for name, value in trial_step(self._optimizer, stand_ins).get(id(slot.parameter), {}).items():
            if not isinstance(value, torch.Tensor) or not value.dim():
                found[name] = value
            elif tuple(value.shape) == seen.shape:
                whole = dense(stored_in_order(value, made.stride()))
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


def _tensors(settings: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, torch.Tensor]]:
    for group in settings:
        for name, value in group.items():
            if isinstance(value, torch.Tensor):
                yield name, value
