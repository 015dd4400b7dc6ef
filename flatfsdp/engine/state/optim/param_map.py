"""Map between an optimizer's parameters and the names of the model's parameters in them.

[Note: optimized parameters] An optimizer steps on holders ([Note: faces]), or on parameters outside of every unit. It
numbers them in the order of its own param groups, which may differ between ranks. State dicts use names
([Note: clean names]); `OptimizedParam` connects the two.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ....errors import ConfigTypeError, ConfigValueError, UsageError, refuse_type
from ...flat.flat_param import FlatParamHandle
from ..named_param import NamedParam, named_state

Key = int | str


@dataclass(frozen=True)
class OptimizedParam:
    """One parameter of an optimizer.

    Attributes:
        key: its key in the optimizer's own state dict: its number, or its name if the optimizer uses names.
        parameter: the tensor that the optimizer steps on.
        params: the model's parameters in it: one, or those of a flat parameter in layout order.
    """

    key: Key
    parameter: torch.Tensor
    params: tuple[NamedParam, ...]

    @property
    def name(self) -> str:
        """The first name in it, which is unique."""
        return self.params[0].name

    @property
    def handle(self) -> FlatParamHandle | None:
        """The handle that it belongs to; None outside of every unit."""
        return None if self.params[0].unit is None else self.params[0].handle

    @property
    def is_flat(self) -> bool:
        """Whether its parameters share the states that an optimizer has for it."""
        return self.handle is not None and self.handle.face.shares_holder

    @property
    def at_rest(self) -> torch.Tensor:
        """The tensor that this rank steps on: between forward and backward the parameter itself shows nothing."""
        return self.parameter.detach() if self.handle is None else self.elements_of(self.handle.shard.detach())

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a state that has an element for each of its elements."""
        return tuple(self.at_rest.shape)

    @property
    def reports(self) -> bool:
        """Whether this rank's optimizer has all of its states: it gets gradients here."""
        return self.handle is None or self.params[0].index in self.handle.face.present

    @property
    def keeps_any_shape(self) -> bool:
        """Whether states of other shapes are valid: they are those of the user's parameter, all of which is here."""
        named = self.params[0]
        if self.handle is None:
            return True
        return self.parameter is named.original and named.span_in_shard.numel == named.spec.whole.numel

    def elements_of(self, flat: torch.Tensor) -> torch.Tensor:
        """Its elements of `flat`, laid out like its handle's shard, in that layout; a view, or `flat`."""
        assert self.handle is not None
        return self.handle.face.elements_of(self.params[0].index, flat)

    def pieces_of(self, state: dict[str, Any]) -> dict[str, Any]:
        """This rank's `state` of it, with pieces laid out as in the shard in place of distributed tensors."""
        if (handle := self.handle) is None:
            return state
        index, piece_of = self.params[0].index, handle.face.piece_of
        return {
            name: piece_of(index, value) if isinstance(value, torch.Tensor) else value for name, value in state.items()
        }

    def like_holder(self, piece: torch.Tensor) -> torch.Tensor:
        """The inverse for one state of the parameter's shape."""
        handle = self.handle
        return piece if handle is None else handle.face.like_holder((self.params[0].index,), piece)


class ParamMap:
    """The parameters of `model` that an optimizer holds.

    Attributes:
        params: every parameter of the model, in the order of its state dict.
        groups: the optimizer's param groups.
        by_name: the optimizer's parameters, by the first names of the model's parameters in them.
    """

    def __init__(self, model: nn.Module, groups: Iterable[Iterable[torch.Tensor]], *, by_name: bool = False) -> None:
        """`groups`: the parameters of each param group; `by_name`: the optimizer's keys are names of
        `model.named_parameters()`, not numbers.

        Raises:
            UsageError: a parameter that is not the model's, or one that was flattened after the optimizer was built.
        """
        self.params = named_state(model)
        inside: dict[int, list[NamedParam]] = {}  # by the id of the tensor that an optimizer can step on
        flattened: dict[int, NamedParam] = {}
        for named in self.params:
            holder = named.leaf if named.unit is None else named.handle.face.holder_of(named.index)
            inside.setdefault(id(holder), []).append(named)
            if holder is not named.leaf:
                flattened[id(named.leaf)] = named
        keys: dict[int, Key] = {id(p): name for name, p in model.named_parameters()} if by_name else {}
        self.groups: list[list[OptimizedParam]] = []
        for number, group in enumerate(groups):
            self.groups.append([])
            for parameter in group:
                if id(parameter) not in inside:
                    _refuse(parameter, number, flattened.get(id(parameter)))
                key: Key = keys.setdefault(id(parameter), len(keys))
                params = tuple(sorted(inside[id(parameter)], key=lambda named: named.index))
                self.groups[-1].append(OptimizedParam(key, parameter, params))
        self.by_name = {named.name: each for each in self for named in each.params}

    def __iter__(self) -> Iterator[OptimizedParam]:
        for group in self.groups:
            yield from group


def check_dict(state_dict: Any) -> dict[str, Any]:
    """`state_dict`, if it looks like an optimizer's.

    Raises:
        ConfigTypeError, ConfigValueError: naming the fault.
    """
    if not isinstance(state_dict, dict):
        raise ConfigTypeError(f"optim_state_dict: got {type(state_dict).__name__}. Accepted: a dict")
    if "state" not in state_dict:
        raise ConfigValueError(
            f'optim_state_dict: expected the keys "state" and "param_groups", found {list(map(str, state_dict))}. '
            "Where only rank 0 has the dict, pass FullOptimStateDictConfig(rank0_only=True), or call "
            "scatter_full_optim_state_dict()"
        )
    if not isinstance(state_dict["state"], dict):
        raise ConfigTypeError(f'optim_state_dict["state"]: got {type(state_dict["state"]).__name__}. Accepted: a dict')
    return state_dict


def groups_of(
    model: nn.Module, optim: torch.optim.Optimizer | None, optim_input: Any = None
) -> list[list[torch.Tensor]]:
    """The parameters of each param group: of `optim_input`, in the form that optimizers accept, else of `optim`, else
    all of the model's as one group."""
    if optim_input is None:
        if optim is None:
            return [list(model.parameters())]
        return [list(group["params"]) for group in optim.param_groups]
    accepted = "the input of the optimizer: parameters, or param groups as dicts"
    if isinstance(optim_input, torch.Tensor) or not isinstance(optim_input, Iterable):
        refuse_type("optim_input", optim_input, accepted)
    given = list(optim_input)
    if any(isinstance(each, dict) for each in given):
        groups = [each.get("params", ()) if isinstance(each, dict) else None for each in given]
    else:
        groups = [given]
    out = []
    for group in groups:
        if isinstance(group, torch.Tensor):
            group = [group]
        elif not isinstance(group, Iterable):
            refuse_type("optim_input", optim_input, accepted)
        members = [each[1] if isinstance(each, tuple) else each for each in group]
        for each in members:
            if not isinstance(each, torch.Tensor):
                refuse_type("optim_input", each, accepted)
        out.append(members)
    return out


def others_of(optim: torch.optim.Optimizer | None) -> list[Any]:
    """The keys of an optimizer's state that are not parameters."""
    return [] if optim is None else [key for key in optim.state if not isinstance(key, torch.Tensor)]


def _refuse(parameter: torch.Tensor, group: int, named: NamedParam | None) -> None:
    if named is not None:
        raise UsageError(
            f"param group {group} of the optimizer holds {named.name!r}, {named.handle.face.words.unstepped}"
        )
    raise UsageError(
        f"param group {group} of the optimizer holds a parameter of shape {tuple(parameter.shape)} that is not in the "
        "model. Pass the model whose parameters the optimizer was built with"
    )
