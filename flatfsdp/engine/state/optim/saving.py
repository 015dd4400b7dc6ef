"""An optimizer's state by the names of the model's parameters: full, or this rank's elements of it.

[Note: optimizer state dicts] {"state": {name: {state: value}}, "param_groups": [...]}, like that of an optimizer over
the model before it was wrapped, with names ([Note: clean names]) for numbers. First, ranks exchange descriptions
of their states ([Note: described states]), because a rank has no information on parameters without elements there.
Full states are then gathered one state of one unit at a time; sharded ones need no further communication.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ....errors import ConfigValueError
from ...agreement.object_collectives import all_or_none, is_first_of, ranks_over
from ...comm.axes import Axis
from ...comm.transport import Transport
from ...flat.flat_param import FlatParamHandle
from ...flat.layout_views import dense
from ...guards.optimizer_hooks import wholes_of
from ...models.rest import collective_call, quiesce
from ...models.walks import units_in
from ...runtime.unit import Unit
from ..consolidate import consolidated
from ..model.distributed_values import carried
from ..model.types import StateDictRequest, shares_memory
from ..named_param import NamedParam, by_handle
from ..parts import every_axis
from .descriptions import Description, OtherState, ParamShaped, agree, description_of, value_of
from .param_map import Key, ParamMap, check_dict, groups_of
from .trial import state_before_first_step

DOING = {
    "whole": "gathers the state of an optimizer",
    "interval": "takes this rank's elements of the state of an optimizer",
    "sharded_tensor": "gathers the state of an optimizer into ShardedTensors",
    "dtensor": "gathers the state of an optimizer into DTensors",
    "fsdp1": "gathers the state of an optimizer as FSDP1 has it",
}


def state_by_name(
    model: nn.Module,
    optim: torch.optim.Optimizer,
    state_dict: dict[str, Any] | None,
    wanted: StateDictRequest,
    *,
    optim_input: Any = None,
    group: Any = None,
) -> dict[str, Any]:
    """[Note: optimizer state dicts]. `state_dict`: the optimizer's own, if it is not `optim.state_dict()`.

    Collective over the axes of the model's units. No value shares memory with the optimizer's.
    """
    with collective_call(units_in(model), "optim_state_dict()", always=True):
        axes = initialized_axes(model)
        if (wholes := wholes_of(optim)) is not None:
            wholes.to_shards()
        doing = DOING[wanted.carrier]
        saving = _Saving(wanted)

        def prepare() -> tuple[bool, dict[str, Description | None]]:
            saving.keeps = is_source(axes, group) or not wanted.rank0_only
            saving.take(model, optim, state_dict, groups_of(model, optim, optim_input))
            return bool(saving.own), saving.descriptions()

        def step() -> dict[str, Description | None]:
            saving.own = state_before_first_step(optim, saving.param_map.groups)
            return saving.descriptions()

        answers = all_or_none(axes, prepare, doing=doing, objects=True)
        described = {rank: each for rank, (_, each) in answers.items()}
        if not any(has_state for has_state, _ in answers.values()):
            described = all_or_none(axes, step, doing=f"{doing}, before its first step", objects=True)
        return saving.state_dict(agree(described))


def initialized_axes(model: nn.Module) -> list[Transport]:
    """The axes over which units of `model` are spread, and those of parts, each once. Collective if no collective
    operation came before."""
    units = units_in(model)
    quiesce(units, shards=False)
    return every_axis(units)


def is_source(axes: Sequence[Transport], group: Any) -> bool:
    """Whether this rank is the first of `group`, or else of the model: the one for values that only one rank gets."""
    if group is None:
        return is_first_of(axes)
    given = Axis.of(group, torch.device("cpu"))
    if given.rank < 0:
        raise ConfigValueError(f"group: this rank is not in it; its ranks are {list(given.ranks)}")
    if not set(given.ranks) <= set(ranks_over(axes) or given.ranks):
        raise ConfigValueError(
            f"group: expected ranks among {ranks_over(axes)}, over which the model is sharded, found "
            f"{list(given.ranks)}; omit this argument"
        )
    return given.rank == 0


class _Saving:
    """One state dict, assembled from this rank's optimizer state and from all ranks' descriptions.

    Attributes:
        keeps: whether this rank gets the gathered values.
        param_map: the parameters that the optimizer steps on.
        own: its state by key, without entries that have no states.
        others: entries of its state that belong to no parameter.
    """

    keeps: bool
    param_map: ParamMap
    own: Mapping[Key, dict[str, Any]]
    others: Mapping[Any, Any]

    def __init__(self, wanted: StateDictRequest) -> None:
        self._wanted = wanted
        self._param_groups: Sequence[Mapping[str, Any]] | None = None
        self._made: defaultdict[str, dict[str, Any]] = defaultdict(dict)

    def take(
        self,
        model: nn.Module,
        optim: torch.optim.Optimizer,
        state_dict: dict[str, Any] | None,
        groups: list[list[torch.Tensor]],
    ) -> None:
        """Read the state of this rank's optimizer."""
        own = optim.state_dict() if state_dict is None else check_dict(state_dict)
        self._param_groups = own.get("param_groups")
        if self._param_groups is None:
            names = {name for name, _ in model.named_parameters()}
            keys = [key for key in own["state"] if key in names]
        else:
            keys = [key for each in self._param_groups for key in each["params"]]
        self.param_map = ParamMap(model, groups, by_name=any(isinstance(key, str) for key in keys))
        known = [param.key for param in self.param_map]
        if self._param_groups is not None and sorted(map(str, keys)) != sorted(map(str, known)):
            raise ConfigValueError(
                f"optim_state_dict: its param groups have {len(keys)} parameters, those of the optimizer have "
                f"{len(known)}, or their keys differ. Pass the optimizer's own state_dict(), or omit this argument"
            )
        states = own["state"]
        self.own = {each.key: each.pieces_of(states[each.key]) for each in self.param_map if states.get(each.key)}
        self.others = {key: entry for key, entry in own["state"].items() if key not in {*known}}

    def descriptions(self) -> dict[str, Description | None]:
        """This rank's descriptions for the others: states of every parameter in units of which it has elements."""
        found: dict[str, Description | None] = {}
        for unit, kind, members in by_handle(self.param_map.params):
            for named in _describing(unit.handles[kind], members):
                param = self.param_map.by_name.get(named.name)
                if param is None:
                    if named.has_elements:
                        found[named.name] = None
                elif param.reports:
                    found[named.name] = description_of(param, self.own.get(param.key, {}))
        return found

    def state_dict(self, agreed: Mapping[str, Description]) -> dict[str, Any]:
        """All states and groups, in the order of the model's parameters; empty unless this rank `keeps` them.
        Collective if states are gathered."""
        for unit, kind, members in by_handle(self.param_map.params):
            self._add(unit, kind, _by_name(unit.handles[kind], members, agreed))
        if not self.keeps:
            return {}
        made = self._made
        for param in self.param_map:
            if param.handle is None and (values := self.own.get(param.key)):
                made[param.name] = {
                    name: value.detach()
                    if shares_memory() and isinstance(value, torch.Tensor)
                    else _copied(value, self._wanted.device)
                    for name, value in values.items()
                }
        ordered: dict[Any, Any] = {each.name: made[each.name] for each in self.param_map.params if each.name in made}
        ordered |= {key: value_of(value) for key, value in self.others.items()}
        return {"state": ordered, **self._named_groups()}

    def _add(self, unit: Unit, kind: int, described: Mapping[NamedParam, Description]) -> None:
        """Add the states of the parameters of one handle. Collective if they are gathered."""
        wanted, handle = self._wanted, unit.handles[kind]
        if wanted.carrier != "interval":
            for name, dtype in shaped_states(described.values()):
                having = [named for named, states in described.items() if states.get(name) == ParamShaped(dtype)]
                with consolidated(unit, kind, self._shard_of(handle, having, name, dtype)) as views:
                    for named in having if self.keeps or unit.views[kind].extended else ():
                        value = carried(views[named.index], unit, kind, named.index, wanted, keeps=self.keeps)
                        if self.keeps:
                            self._made[named.name][name] = value
        for named, states in described.items():
            # States of the parameter's shape come first: files use this order.
            for name, each in sorted(states.items(), key=lambda item: not isinstance(item[1], ParamShaped)):
                if not isinstance(each, ParamShaped):
                    value = each.value if isinstance(each, OtherState) else each
                    on_every_rank = isinstance(each, OtherState) and value is None
                    self._made[named.name][name] = value_of(self._state(named, name) if on_every_rank else value)
                elif wanted.carrier == "interval":
                    local = self._local_of(handle, named, name, each.dtype)
                    if not shares_memory():
                        local = local.to(wanted.device or handle.shard.device, copy=True)
                    self._made[named.name][name] = named.interval(local)

    def _state(self, named: NamedParam, name: str) -> Any:
        return self.own[self.param_map.by_name[named.name].key][name]

    def _shard_of(
        self, handle: FlatParamHandle, having: Sequence[NamedParam], name: str, dtype: torch.dtype
    ) -> torch.Tensor:
        """One state of parameters of one handle, laid out like its shard."""
        stepped = self.param_map.by_name
        own = [named for named in having if named.name in stepped and stepped[named.name].reports]
        return handle.face.joined({named.index: self._state(named, name).detach() for named in own}, dtype)

    def _local_of(self, handle: FlatParamHandle, named: NamedParam, name: str, dtype: torch.dtype) -> torch.Tensor:
        """This rank's elements of one state of its parameter's shape, in memory order, 1-D; in place if it has that
        order."""
        if named.span_in_param.is_empty:
            return torch.empty(0, dtype=dtype)
        value = handle.face.elements_in(named.index, self._state(named, name).detach())
        if value.dim() == 1:
            return value
        spec = named.spec
        if value.is_contiguous() if spec.stride is None else value.stride() == spec.stride:
            return dense(value)
        interval = named.interval(value.new_empty(spec.numel))
        interval.take_from(value)
        return interval.local

    def _named_groups(self) -> dict[str, list[dict[str, Any]]]:
        """The param groups with names in place of keys, as an entry of a state dict; none if they were not given."""
        if self._param_groups is None:
            return {}
        names = {param.key: [named.name for named in param.params] for param in self.param_map}
        out = []
        for group in self._param_groups:
            covered = [name for key in group["params"] for name in names[key]]
            own = {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
            if "param_names" in own:
                own["param_names"] = list(covered)
            out.append({**own, "params": covered})
        return {"param_groups": out}


def _describing(handle: FlatParamHandle, members: Sequence[NamedParam]) -> Sequence[NamedParam]:
    """The parameters of one handle by whose names states are described: the first of each that optimizers step on."""
    return [*_first_of_each(handle, members).values()]


def _first_of_each(handle: FlatParamHandle, members: Sequence[NamedParam]) -> dict[int, NamedParam]:
    """By the id of each parameter that optimizers step on, the first of `members` in it."""
    found: dict[int, NamedParam] = {}
    for named in sorted(members, key=lambda named: named.index):
        found.setdefault(id(handle.face.holder_of(named.index)), named)
    return found


def _by_name(
    handle: FlatParamHandle, members: Sequence[NamedParam], agreed: Mapping[str, Description]
) -> dict[NamedParam, Description]:
    """The agreed description for each parameter of one handle that has states."""
    first = _first_of_each(handle, members)
    names = {named: first[id(handle.face.holder_of(named.index))].name for named in members}
    return {named: agreed[name] for named, name in names.items() if name in agreed}


def shaped_states(described: Iterable[Mapping[str, Any]]) -> list[tuple[str, torch.dtype]]:
    """Every state of the parameters' shapes with its dtype, once, in an order that all ranks share."""
    found = {(name, each.dtype) for states in described for name, each in states.items() if type(each) is ParamShaped}
    return sorted(found, key=str)


def _copied(value: Any, device: torch.device | None) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().to(device or value.device, copy=True)
    return value_of(value, device=device)
