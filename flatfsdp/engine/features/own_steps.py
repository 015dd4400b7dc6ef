"""Steps of an optimizer's own class on whole matrices, which owners have for the time of a step.

[Note: own steps] An owner gets matrices with their gradients, and a stand-in of the optimizer takes a step of the class
on them: on the shapes, gradients and states of one process, so that it computes the same numbers. The state of a matrix
is in `optimizer.state` of its owner, and nowhere else ([Note: states of matrices]). Parameters travel with gradients
although an owner could keep a copy: a program may write to its shards in any way, of which versions show only some, and
an owner with an old copy would silently undo it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ...errors import UsageError
from ..guards.optimizer_hooks import OfOptimizer
from ..layout.layout import Span
from ..state.optim.descriptions import KeptWhole
from ..state.optim.optimizer_clone import Changes, Settings, clone_over, unhooked_step
from ..state.optim.trial import trial_step
from .matrix_exchange import Entry, Slot, Whole
from .matrix_states import form_of, keep_whole, whole_state

State = dict[str, Any]


class OwnSteps(OfOptimizer):
    """The steps of an optimizer's class on whole matrices: a `Work`.

    Args:
        changes: gets what these change of the optimizer. Each bucket begins with the settings from before the step, and
            sets the same ones, or was refused in a trial.
    """

    sent = 2
    in_parts = False

    def __init__(self, optimizer: torch.optim.Optimizer, changes: list[Changes]) -> None:
        super().__init__(optimizer)
        self._changes = changes

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
        state: defaultdict[Any, State] = defaultdict(dict)
        state |= {made: whole_state(optimizer.state, entry) for entry, made in stand_ins}
        state |= {key: value for key, value in optimizer.state.items() if not isinstance(key, torch.Tensor)}
        self._changes.append(step_over(optimizer, params, state))
        for entry, made in stand_ins:
            keep_whole(optimizer.state, entry, state.pop(made, {}))
        optimizer.state.update(state)  # what it keeps for no parameter
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


def step_over(
    optimizer: torch.optim.Optimizer, params: Sequence[list[nn.Parameter]], state: defaultdict[Any, State]
) -> Changes:
    """Let a stand-in of `optimizer` step on `params`, by param group, with their `state`, in the groups that have some.
    Returned: what it has changed."""
    stepping = clone_over(optimizer, params)
    stepping.state = state
    before, groups = Settings(stepping), stepping.param_groups
    stepping.param_groups = [group for group in groups if group["params"]]
    unhooked_step(stepping)
    stepping.param_groups = groups
    return before.changes(stepping)


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
