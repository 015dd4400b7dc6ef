"""States of whole matrices, moved from their owners to the shards, for state dicts, and back.

[Note: states of matrices] Between steps the state of a matrix is with its owner, as a `WholeState`. Before a state dict
is made, each tensor with the shape of its matrix is divided: every rank gets its part, as if the optimizer were
element-wise. A tensor of another shape (a value for each row) is copied to every rank, as a `KeptWhole`; those of the
experts in one parameter as one tensor, with a first dimension more. So state
dicts, checkpoints and other layouts on other ranks treat these as any state, by names. Before the next step, states go
to the owners that matrices have then, which need not be those from which they came.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...errors import AgreementError, UsageError
from ..agreement.object_collectives import all_or_none
from ..base import _dtensor
from ..layout.layout import Span
from ..state.optim.descriptions import KeptWhole, ParamShaped, alike, value_of
from ..state.optim.saving import shaped_states
from .matrix_adapters import Slot
from .matrix_exchange import MatrixExchange, exchanged
from .own_steps import IN_PARTS, WITH_STATE, State, States, form_of, keep_whole, whole_state


def to_shards(exchange: MatrixExchange, states: States) -> None:
    """Divide the states of all matrices: each rank has its parts of them afterwards. Collective.

    Raises:
        UsageError: the matrices of one parameter have different states; nothing was moved.
    """
    entries = exchange.entries

    def describe() -> dict[int, State]:
        whole = [i for i, entry in enumerate(entries) if form_of(states, entry) == WITH_STATE]
        return {i: _described(whole_state(states, entries[i]), entries[i].seen.shape) for i in whole}

    found = _of_all(exchange, describe)
    pieces: dict[Slot, State] = {}
    of_experts: dict[tuple[Slot, str], list[torch.Tensor]] = {}
    for index, description in sorted(found.items()):
        slot, seen = entries[index]
        state = {name: value for name, value in description.items() if not isinstance(value, ParamShaped)}
        for name, value in state.items() if seen.expert is not None else ():
            if isinstance(value, KeptWhole):
                of_experts.setdefault((slot, name), []).append(value)
                state[name] = tuple(value.shape)
        if not alike(first := pieces.setdefault(slot, state), state):
            raise UsageError(
                f"matrix_steps: the matrices of {slot.name} have different optimizer states, {first} and {state}, "
                "which cannot be saved as one"
            )
    for (slot, name), values in of_experts.items():
        pieces[slot][name] = torch.stack(values).as_subclass(KeptWhole)
    for name, dtype in shaped_states(found.values()):
        indices = [i for i in sorted(found) if found[i].get(name) == ParamShaped(dtype)]
        for slot in {entries[i].slot: None for i in indices}:
            made = torch.empty(slot.own().numel(), dtype=dtype, device=exchange.transport.device.device)
            pieces[slot].setdefault(name, made)
        flats = {
            i: entries[i].seen.flat(whole_state(states, entries[i])[name])
            for i in indices
            if exchange.plan.owners[i] == exchange.rank
        }
        parts = {i: pieces[entries[i].slot][name] for i in indices}
        _move(exchange, parts, flats, dtype, to_owners=False)
    for slot, state in pieces.items():
        had = states.pop(slot.parameter, None) is not None
        if slot.index in slot.handle.face.present:
            shaped = {name for name, _ in shaped_states(each for i, each in found.items() if entries[i].slot is slot)}
            states[slot.parameter] = {
                name: like_holder(slot, value) if name in shaped else value_of(value) for name, value in state.items()
            }
        elif had:  # torch's `get_optimizer_state_dict` makes a step where an optimizer has no state
            states[slot.parameter] = {}


def to_owners(exchange: MatrixExchange, optimizer: torch.optim.Optimizer) -> None:
    """Put the states of all matrices of which ranks have parts together, each with its owner. Collective.

    Raises:
        AgreementError: ranks have different states of a matrix.
    """
    entries, states = exchange.entries, optimizer.state

    def describe() -> dict[int, State]:
        described = {}
        for i, (slot, seen) in enumerate(entries):
            is_here = not exchange.plan.matrices[i].span_of(exchange.rank).is_empty
            if is_here and form_of(states, entries[i]) == IN_PARTS:
                shape = slot.handle.face.local_of(slot.parameter).shape
                described[i] = _described(states[slot.parameter], shape, seen.expert)
        return described

    found = _of_all(exchange, describe)
    made = {
        i: {
            name: at_owner(value, optimizer.param_groups[entries[i].slot.group], exchange.transport.device.device)
            for name, value in description.items()
            if not isinstance(value, ParamShaped)
        }
        for i, description in found.items()
        if exchange.plan.owners[i] == exchange.rank
    }
    for name, dtype in shaped_states(found.values()):
        indices = [i for i in sorted(found) if found[i].get(name) == ParamShaped(dtype)]
        held = {i: states.get(entries[i].slot.parameter, {}).get(name) for i in indices}
        parts = {i: value if value is None else entries[i].slot.like_own(value) for i, value in held.items()}
        device = exchange.transport.device.device
        flats = {
            i: torch.empty(exchange.plan.matrices[i].numel, dtype=dtype, device=device) for i in indices if i in made
        }
        _move(exchange, parts, flats, dtype, to_owners=True)
        for i, flat in flats.items():
            made[i][name] = entries[i].seen.view(flat)
    for slot in {entries[i].slot: None for i in found}:
        states.pop(slot.parameter, None)
    for i, state in made.items():
        keep_whole(states, entries[i], state)


def _move(
    exchange: MatrixExchange,
    parts: Mapping[int, Any],
    flats: Mapping[int, torch.Tensor],
    dtype: torch.dtype,
    *,
    to_owners: bool,
) -> None:
    """Copy one state of matrices, by their indices, from `parts`, which are ordered like `Slot.own`, into `flats` of
    their owners, or back. Collective, if any rank sends something."""
    plan, rank, indices = exchange.plan, exchange.rank, [*parts]

    def part(index: int, span: Span) -> torch.Tensor:
        return exchange.entries[index].within(parts[index], span)

    def flat(index: int, span: Span) -> torch.Tensor:
        return flats[index][span.slice]

    source, target = (part, flat) if to_owners else (flat, part)
    ways = [plan.outgoing(indices, rank), plan.incoming(indices, rank)]
    for index in flats:
        own = plan.matrices[index].span_of(rank)
        if not own.is_empty:
            target(index, own).copy_(source(index, own))
    if plan.is_exchanged(indices):
        going, coming = ways if to_owners else ways[::-1]
        for index, span, (elements,) in exchanged(exchange.transport, going, coming, lambda *i: [source(*i)], dtype):
            target(index, span).copy_(elements)


def _of_all(exchange: MatrixExchange, describe: Any) -> dict[int, State]:
    """The descriptions of every rank as one, by the index of the matrix."""
    doing = "moves the optimizer states of matrices"
    merged: dict[int, State] = {}
    for rank, described in all_or_none([exchange.transport], describe, doing=doing, objects=True).items():
        for index, description in described.items():
            if index in merged and not alike(merged[index], description):
                raise AgreementError(
                    f"matrix_steps: rank {rank} has other optimizer state of {exchange.entries[index].slot.name} than "
                    f"ranks before it: {sorted(description)}, {sorted(merged[index])}, or other values of these"
                )
            merged.setdefault(index, description)
    return merged


def _described(state: State, shape: Sequence[int], expert: int | None = None) -> State:
    """A state of a matrix, or of a part of one, of this `shape`. `expert`: the matrix, of states of several."""
    found: State = {}
    for name, value in state.items():
        if not isinstance(value, torch.Tensor) or not value.dim():
            found[name] = value_of(value)
        elif not isinstance(value, KeptWhole) and (_dtensor.is_dtensor(value) or value.shape == torch.Size(shape)):
            found[name] = ParamShaped(value.dtype)
        else:
            found[name] = value_of(value if expert is None else value[expert]).as_subclass(KeptWhole)
    return found


def at_owner(value: Any, group: Mapping[str, Any], device: torch.device) -> Any:
    """A state that is no part: those of other shapes are on the `device`, and so are step counts of optimizers whose
    kernels read them there."""
    if isinstance(value, KeptWhole):
        return value.as_subclass(torch.Tensor).to(device)
    on_device = isinstance(value, torch.Tensor) and (group.get("capturable") or group.get("fused"))
    return value_of(value, device=device if on_device else None)


def like_holder(slot: Slot, piece: torch.Tensor) -> torch.Tensor:
    """`piece`, one state of this rank's elements in memory order, in the form that a state of the parameter has."""
    if _dtensor.is_dtensor(slot.parameter):
        return slot.handle.face.like_holder((slot.index,), piece)
    local = slot.handle.face.local_of(slot.parameter)
    return piece.as_strided(local.shape, local.stride())
