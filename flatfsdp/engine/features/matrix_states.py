"""States of whole matrices, moved from their owners to the shards, for state dicts, and back.

[Note: states of matrices] Between steps the state of a matrix is with its owner, as a `WholeState`. Before a state dict
is made, each tensor with the shape of its matrix is divided: every rank gets its part, as if the optimizer were
element-wise. A tensor of another shape (a value for each row) is copied to every rank, as a `KeptWhole`. So state
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
from ..planning.owners import Piece
from ..state.optim.descriptions import KeptWhole, ParamShaped, alike, value_of
from .matrix_exchange import IN_PARTS, WITH_STATE, Entry, MatrixExchange, Slot, counted, each_piece

State = dict[str, Any]
States = dict[Any, State]


class WholeState(State):
    """The state of a whole matrix, at its owner."""

    def __reduce__(self) -> tuple[Any, ...]:
        return WholeState, (dict(self),)  # as `torch.load(weights_only=True)` can read it


torch.serialization.add_safe_globals([WholeState])

EXPERTS = "experts"  # the key of the states of a parameter's matrices, by number, if it has several


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
    if isinstance(state, WholeState):
        return WITH_STATE
    if entry.seen.expert is not None:
        return IN_PARTS
    # It was loaded: by name, so that this rank has its part; or by the optimizer, from a state dict of this rank.
    local = tuple(entry.slot.handle.face.local_of(entry.slot.parameter).shape)
    for value in state.values():
        if _dtensor.is_dtensor(value) or isinstance(value, KeptWhole):
            return IN_PARTS
        if isinstance(value, torch.Tensor) and value.dim() and tuple(value.shape) == local != entry.seen.shape:
            return IN_PARTS
    return WITH_STATE


def to_shards(exchange: MatrixExchange, states: States) -> None:
    """Divide the states of all matrices: each rank has its parts of them afterwards. Collective.

    Raises:
        UsageError: the matrices of one parameter have different states; nothing was moved.
    """
    entries = exchange.entries

    def describe() -> dict[int, State]:
        whole = [i for i, entry in enumerate(entries) if form_of(states, entry) == WITH_STATE]
        return {i: _described(entries[i], whole_state(states, entries[i])) for i in whole}

    found = _of_all(exchange, describe)
    pieces: dict[Slot, State] = {}
    for index, description in sorted(found.items()):
        slot = entries[index].slot
        state = {name: value for name, value in description.items() if not isinstance(value, ParamShaped)}
        _check_experts(slot, pieces.setdefault(slot, state), state)
    for name, dtype in _shaped(found):
        indices = [i for i in sorted(found) if found[i].get(name) == ParamShaped(dtype)]
        flats = {
            i: entries[i].seen.flat(whole_state(states, entries[i])[name])
            for i in indices
            if exchange.plan.owners[i] == exchange.rank
        }
        going, coming = exchange.plan.incoming(indices, exchange.rank), exchange.plan.outgoing(indices, exchange.rank)
        device = exchange.transport.device.device
        arrived = _exchanged(exchange, indices, [flats[i][s.slice] for i, s in each_piece(going)], coming, going, dtype)
        for i in indices:
            slot = entries[i].slot
            if name not in pieces[slot]:
                pieces[slot][name] = torch.empty(slot.own().numel(), dtype=dtype, device=device)
            span = exchange.plan.matrices[i].span_of(exchange.rank)
            if i in flats and not span.is_empty:
                entries[i].within(pieces[slot][name], span).copy_(flats[i][span.slice])
        for i, span in each_piece(coming):
            entries[i].within(pieces[entries[i].slot][name], span).copy_(arrived[: span.numel])
            arrived = arrived[span.numel :]
    for slot, state in pieces.items():
        states.pop(slot.parameter, None)
        if slot.index in slot.handle.face.present:
            shaped = {n for i, each in found.items() if entries[i].slot is slot for n in each if _is_shaped(each[n])}
            states[slot.parameter] = {
                name: like_holder(slot, value) if name in shaped else value_of(value) for name, value in state.items()
            }


def to_owners(exchange: MatrixExchange, states: States) -> None:
    """Put the states of all matrices of which ranks have parts together, each with its owner. Collective.

    Raises:
        AgreementError: ranks have different states of a matrix.
    """
    entries = exchange.entries

    def describe() -> dict[int, State]:
        return {
            i: _described_part(entry, states[entry.slot.parameter])
            for i, entry in enumerate(entries)
            if form_of(states, entry) == IN_PARTS and not exchange.plan.matrices[i].span_of(exchange.rank).is_empty
        }

    found = _of_all(exchange, describe)
    made = {
        i: {name: _moved(value, exchange) for name, value in description.items() if not _is_shaped(value)}
        for i, description in found.items()
        if exchange.plan.owners[i] == exchange.rank
    }
    for name, dtype in _shaped(found):
        indices = [i for i in sorted(found) if found[i].get(name) == ParamShaped(dtype)]
        parts = {
            i: entries[i].slot.like_own(states[entries[i].slot.parameter][name])
            for i in indices
            if not exchange.plan.matrices[i].span_of(exchange.rank).is_empty
        }
        going, coming = exchange.plan.outgoing(indices, exchange.rank), exchange.plan.incoming(indices, exchange.rank)
        device = exchange.transport.device.device
        sections = [entries[i].within(parts[i], span) for i, span in each_piece(going)]
        arrived = _exchanged(exchange, indices, sections, coming, going, dtype)
        flats: dict[int, torch.Tensor] = {}
        for i in indices:
            if i in made:
                flats[i] = torch.empty(exchange.plan.matrices[i].numel, dtype=dtype, device=device)
                made[i][name] = entries[i].seen.view(flats[i])
                span = exchange.plan.matrices[i].span_of(exchange.rank)
                if not span.is_empty:
                    flats[i][span.slice].copy_(entries[i].within(parts[i], span))
        for i, span in each_piece(coming):
            flats[i][span.slice].copy_(arrived[: span.numel])
            arrived = arrived[span.numel :]
    for slot in {entries[i].slot: None for i in found}:
        states.pop(slot.parameter, None)
    for i, state in made.items():
        keep_whole(states, entries[i], state)


def _exchanged(
    exchange: MatrixExchange,
    indices: Sequence[int],
    sections: Sequence[torch.Tensor],
    coming: Sequence[Sequence[Piece]],
    going: Sequence[Sequence[Piece]],
    dtype: torch.dtype,
) -> torch.Tensor:
    """The pieces `coming` from each rank, one after the other, for `sections`, the pieces `going` to each. Collective,
    if any rank sends something."""
    if not exchange.plan.is_exchanged(indices, exchange.member):
        return torch.empty(0, dtype=dtype)
    work, arrived = exchange.exchange(exchange.transport, sections, counted(coming), counted(going), dtype)
    work.wait()
    return arrived


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


def _described(entry: Entry, state: State) -> State:
    found: State = {}
    for name, value in state.items():
        if not isinstance(value, torch.Tensor) or not value.dim():
            found[name] = value_of(value)
        elif tuple(value.shape) == entry.seen.shape:
            found[name] = ParamShaped(value.dtype)
        else:
            found[name] = value_of(value).as_subclass(KeptWhole)
    return found


def _described_part(entry: Entry, state: State) -> State:
    shape = entry.slot.handle.face.local_of(entry.slot.parameter).shape
    found: State = {}
    for name, value in state.items():
        shaped = isinstance(value, torch.Tensor) and value.dim() and not isinstance(value, KeptWhole)
        if shaped and not _dtensor.is_dtensor(value) and value.shape != shape:
            raise UsageError(
                f"matrix_steps: optimizer state {name!r} of {entry.slot.name} has shape {tuple(value.shape)}, this "
                f"rank's part of the parameter {tuple(shape)}"
            )
        found[name] = ParamShaped(value.dtype) if shaped else value_of(value)
    return found


def _check_experts(slot: Slot, first: State, other: State) -> None:
    if not alike(first, other):
        raise UsageError(
            f"matrix_steps: the matrices of {slot.name} have different optimizer states, {first} and {other}, which "
            "cannot be saved as one"
        )


def _shaped(found: Mapping[int, State]) -> list[tuple[str, torch.dtype]]:
    """The names and dtypes of states that are moved, in an order that is the same on all ranks."""
    names = {(n, v.dtype): None for _, each in sorted(found.items()) for n, v in each.items() if _is_shaped(v)}
    return [*names]


def _moved(value: Any, exchange: MatrixExchange) -> Any:
    """A state that is no part, at the owner: those of other shapes on its device."""
    if isinstance(value, KeptWhole):
        return value.as_subclass(torch.Tensor).to(exchange.transport.device.device)
    return value_of(value)


def _is_shaped(value: object) -> bool:
    return isinstance(value, ParamShaped)


def like_holder(slot: Slot, piece: torch.Tensor) -> torch.Tensor:
    """`piece`, one state of this rank's elements in memory order, in the form that a state of the parameter has."""
    if _dtensor.is_dtensor(slot.parameter):
        return slot.handle.face.like_holder((slot.index,), piece)
    local = slot.handle.face.local_of(slot.parameter)
    return piece.as_strided(local.shape, local.stride())
