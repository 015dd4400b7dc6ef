"""Steps of an optimizer's own class on whole matrices, which owners have for the time of a step.

[Note: own steps] An owner gets matrices with their gradients, and a stand-in of the optimizer takes a step of the class
on them: on the shapes, gradients and states of one process, so that it computes the same numbers. The state of a matrix
is in `optimizer.state` of its owner, and nowhere else ([Note: states of matrices]). Parameters travel with gradients
although an owner could keep a copy: a program may write to its shards in any way, of which versions show only some, and
an owner with an old copy would silently undo it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ...errors import UsageError
from ..guards.optimizer_hooks import OfOptimizer
from ..layout.layout import Span
from ..state.optim.descriptions import KeptWhole
from ..state.optim.optimizer_clone import Changes, Settings, clone_over, unhooked_step
from ..state.optim.trial import trial_step
from .matrix_adapters import Entry, Slot, Whole

State = dict[str, Any]
States = dict[Any, State]
EXPERTS = "experts"  # the key of the states of a parameter's matrices, by number, if it has several
# Flags of a rank's optimizer state of a matrix: it is that of the whole matrix, or of the rank's part.
WITH_STATE, IN_PARTS = 4, 8


class WholeState(State):
    """The state of a whole matrix, at its owner. State dicts have none: states are in parts there."""


def whole_state(states: Mapping[Any, State], entry: Entry) -> State:
    """This rank's state of a matrix; empty if it has none."""
    state = states.get(entry.slot.parameter, {})
    if entry.seen.expert is None:
        return state
    found: State = state.get(EXPERTS, {}).get(entry.seen.expert, {})
    return found


def keep_whole(states: States, entry: Entry, state: State) -> None:
    """Set this rank's state of a matrix, unless it is empty."""
    if state and not isinstance(state, WholeState):
        state = WholeState(state)
    if state and entry.seen.expert is None:
        states[entry.slot.parameter] = state
    elif state:
        states[entry.slot.parameter].setdefault(EXPERTS, {})[entry.seen.expert] = state


def form_of(states: Mapping[Any, State], entry: Entry) -> int:
    """`WITH_STATE` if this rank has the state of a whole matrix, `IN_PARTS` if of its part, or 0."""
    state = states.get(entry.slot.parameter)
    if not state:
        return 0
    if entry.seen.expert is not None and EXPERTS in state:
        return WITH_STATE if entry.seen.expert in state[EXPERTS] else 0
    return WITH_STATE if isinstance(state, WholeState) else IN_PARTS


class OwnSteps(OfOptimizer):
    """The steps of an optimizer's class on whole matrices. No method communicates. [Note: matrix exchange]

    Attributes:
        sent: how many numbers an owner gets for each element of a matrix; one comes back.
        in_parts: whether each rank keeps the optimizer state of its elements.

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
        """The dtype of what is sent in both directions: that of the parameter."""
        return slot.parameter.dtype

    def state_of(self, entry: Entry) -> int:
        """`form_of` its state."""
        return form_of(self.optimizer.state, entry)

    def prepare(self, entries: Sequence[Entry]) -> None:
        """Called at the beginning of a step, with the matrices that have a gradient on any rank. States are made by the
        class."""

    def begin(self, entry: Entry, span: Span) -> Sequence[torch.Tensor]:
        """Numbers of this rank's elements of a matrix, `span`, for the owner, 1-D in memory order: gradient and
        parameter, in place. Called on ranks that have elements, once for each step and matrix that has a gradient."""
        return entry.within(entry.slot.gradient(), span), entry.within(entry.slot.own(), span)

    def compute(self, wholes: Sequence[Whole]) -> Sequence[torch.Tensor]:
        """Step on these matrices, which this rank owns; the results, for all elements, are the parameters."""
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

    def end(self, entry: Entry, span: Span, result: torch.Tensor) -> None:
        """Apply a result to this rank's elements: set those of the parameter."""
        own = entry.within(entry.slot.own(), span)
        if own.data_ptr() != result.data_ptr():  # a matrix that is not cut is stepped on in place
            own.copy_(result)

    def state_before_first_step(self, entries: Sequence[Entry]) -> State:
        """This rank's part of the state, from a trial on one matrix of zeros. [Note: trial step]"""
        slot, seen = entries[0].slot, entries[0].seen
        like = slot.handle.at_rest.views[slot.index]
        own = slot.handle.layout.span_in_param(slot.index, slot.handle.rank)
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
                piece = seen.flat(value).repeat(len(entries))[own.slice].to(like.device)
                found[name] = piece.as_strided(like.shape, like.stride())
            else:
                of_all = value if seen.expert is None else value.expand(len(entries), *value.shape).clone()
                found[name] = of_all.as_subclass(KeptWhole)
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
