"""Descriptions of an optimizer's states of each parameter, by the ranks that own its elements; equal on all of them.

[Note: described states] A state is *shaped* if it has an element for each of the parameter's: it is split as the
parameter is. Every other state (a step count, a flag) is one value for the whole parameter: the same on all ranks that
own elements, and for a flat parameter the same for all parameters in it. A tensor of another shape is *kept* unchanged
if one rank sees the whole parameter; if ranks see parts of it, there is no rule for assembling such tensors. A
rank that owns no element of a parameter does not describe it: optimizers have no state there, or an empty one.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ....errors import AgreementError, UsageError, ranks_in_words
from ...flat.faces import OriginalFace
from .param_map import OptimizedParam

# By the name of the state: ParamShaped, OtherState, UnsupportedState, or the value itself.
Description = dict[str, Any]


@dataclass(frozen=True)
class ParamShaped:
    """A tensor with an element for each of the parameter's."""

    dtype: torch.dtype


@dataclass(frozen=True)
class OtherState:
    """Another object that holds tensors. `value` is on the CPU; None if every rank has it itself."""

    value: Any


class KeptWhole(torch.Tensor):
    """A state of another shape than the parameter's, of which each rank has all while the parameter is in parts: of an
    optimizer that steps on whole matrices, or has states of blocks."""

    def __deepcopy__(self, memo: dict[int, Any]) -> KeptWhole:
        return self.as_subclass(torch.Tensor).clone().as_subclass(KeptWhole)


torch.serialization.add_safe_globals([KeptWhole])


@dataclass(frozen=True)
class UnsupportedState:
    """The description of a state that cannot be assembled."""

    words: str


def description_of(param: OptimizedParam, state: Mapping[str, Any]) -> Description:
    """The description of this rank's `state` of `param`."""
    found: Description = {}
    handle = param.handle
    for name, value in state.items():
        if isinstance(value, KeptWhole):
            found[name] = OtherState(value_of(value.as_subclass(torch.Tensor)))
        elif isinstance(value, torch.Tensor) and value.dim() and tuple(value.shape) == param.shape:
            found[name] = ParamShaped(value.dtype)
        elif not _holds_tensors(value):
            found[name] = value_of(value)
        elif param.keeps_any_shape:
            found[name] = OtherState(None if handle is None or handle.is_unsharded_at_rest else value_of(value))
        elif isinstance(value, torch.Tensor):
            words = f"a tensor of shape {tuple(value.shape)}, where the stepped tensor here has {param.shape}"
            found[name] = UnsupportedState(words)
        else:
            found[name] = UnsupportedState(f"a {type(value).__name__} that holds tensors")
    return found


def value_of(value: Any, *, device: torch.device | None = None) -> Any:
    """A copy of `value`, including tensors in it, independent of later changes; on `device`, by default the CPU."""
    if isinstance(value, torch.Tensor):
        return value.detach().to(device or torch.device("cpu"), copy=True)
    if isinstance(value, dict):
        return {key: value_of(each, device=device) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(value_of(each, device=device) for each in value)
    return copy.deepcopy(value)


def agree(by_rank: Mapping[int, Mapping[str, Description | None]]) -> dict[str, Description]:
    """The common description for every parameter that has states, by its name. None stands for a parameter that the
    rank's optimizer does not hold.

    Raises:
        AgreementError: ranks differ in the set of states, in their dtypes, or in values.
        UsageError: a tensor that cannot be assembled.
    """
    by_name: dict[str, dict[int, Description | None]] = {}
    for rank, described in by_rank.items():
        for name, found in described.items():
            by_name.setdefault(name, {})[rank] = found
    return {name: agreed for name, each in by_name.items() if (agreed := _agreed(name, each))}


def _agreed(name: str, by_rank: Mapping[int, Description | None]) -> Description:
    having = {rank: found for rank, found in by_rank.items() if found}
    if not having:
        return {}
    first, *others = having
    expected = having[first]
    for without, words in ((None, "do not hold it"), ({}, "have no state for it")):
        missing = [rank for rank, found in by_rank.items() if found == without]
        if missing:
            raise AgreementError(
                f"optimizer state of {name!r}: {ranks_in_words(sorted(having))} has {_listed(expected)}, but the "
                f"optimizers of {ranks_in_words(sorted(missing))}, which also own elements of it, {words}. Every rank "
                "must build its optimizer over the same parameters and step it equally often"
            )
    for rank in others:
        if having[rank].keys() != expected.keys():
            raise AgreementError(
                f"optimizer state of {name!r}: rank {first} has {_listed(expected)}, rank {rank} has "
                f"{_listed(having[rank])}. Every rank must use the same optimizer and step it equally often"
            )
        for state, value in expected.items():
            if not alike(value, having[rank][state]):
                _refuse_unsupported(name, state, value, having[rank][state])
                raise AgreementError(
                    f"optimizer state {state!r} of {name!r}: rank {first} has {shown(value)}, rank {rank} has "
                    f"{shown(having[rank][state])}. A state that is not a tensor of the parameter's shape must have "
                    "the same value on every rank that owns elements of the parameter"
                )
    for state, value in expected.items():
        _refuse_unsupported(name, state, value)
    return expected


def _refuse_unsupported(name: str, state: str, *values: Any) -> None:
    for value in values:
        if isinstance(value, UnsupportedState):
            raise UsageError(
                f"optimizer state {state!r} of {name!r} is {value.words}, but the parameter is split over ranks: only "
                "states of the parameter's shape can be reassembled. Use an optimizer whose states have the "
                "shape of their parameters, or keep this parameter unsharded, with ignored_states= or "
                f'sharding_strategy="NO_SHARD", both with {OriginalFace.words.setting}'
            )


def alike(one: Any, other: Any) -> bool:
    """Whether two values of a state are bitwise equal."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        same_form = one.dtype == other.dtype and one.shape == other.shape
        return same_form and torch.equal(_bits(one), _bits(other))
    if isinstance(one, OtherState):
        return alike(one.value, other.value)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(alike(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(alike, one, other))
    try:
        return bool(one == other) or pickle.dumps(one) == pickle.dumps(other)
    except Exception:  # objects that cannot be compared, or not to one bool
        return pickle.dumps(one) == pickle.dumps(other)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().reshape(-1).view(torch.uint8)


def shown(value: Any) -> str:
    """A value of a state, or its description, for messages."""
    if isinstance(value, ParamShaped):
        return f"a tensor of its shape, {value.dtype}"
    if isinstance(value, UnsupportedState):
        return value.words
    if isinstance(value, torch.Tensor):
        what = str(value.item()) if value.dim() == 0 else f"shape {tuple(value.shape)}"
        return f"a tensor, {what}, {value.dtype}"
    text = repr(value.value if isinstance(value, OtherState) else value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _holds_tensors(value: Any) -> bool:
    """Whether there are tensors with dimensions in `value`."""
    if isinstance(value, torch.Tensor):
        return value.dim() > 0
    if isinstance(value, dict):
        return any(map(_holds_tensors, value.values()))
    return isinstance(value, (list, tuple)) and any(map(_holds_tensors, value))


def _listed(states: Description) -> str:
    return ", ".join(sorted(states)) or "none"
