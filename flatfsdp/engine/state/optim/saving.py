"""An optimizer's state by the names of the model's parameters: whole, or what this rank owns of it.

[Note: optimizer state dicts] {"state": {name: {state: value}}, "param_groups": [...]}, like that of an optimizer over
the model before it was wrapped, with names ([Note: clean names]) in place of numbers. Before anything is put together,
ranks tell each other what states they have (`facts`), because a rank knows nothing of parameters of which it owns
no element. Whole states are then gathered one state of one unit at a time; sharded ones need nothing more.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ....errors import ConfigValueError
from ...agreement.object_collectives import all_or_none, is_first_of, ranks_over
from ...comm.axes import Axis
from ...comm.transport import Transport
from ...flat.flat_param import FlatParamHandle
from ...flat.layout_views import dense
from ...runtime.module_tree import units_in
from ...runtime.rest import collective_call, initialize, models_of
from ...runtime.unit import Unit
from ..consolidate import consolidated, store
from ..model.distributed_values import carrier_of, rows_of
from ..model.zero_copy import shares_memory
from ..named_param import NamedParam
from .descriptions import Facts, OtherState, ParamReport, ParamShaped, agree, facts_of, value_of
from .initial_state import state_before_first_step
from .load_plan import check_dict
from .param_map import Key, ParamMap, groups_of

DOING = {
    "whole": "gathers the state of an optimizer",
    "interval": "takes this rank's part of the state of an optimizer",
    "sharded_tensor": "gathers the state of an optimizer into ShardedTensors",
    "dtensor": "gathers the state of an optimizer into DTensors",
    "fsdp1": "gathers the state of an optimizer as FSDP1 has it",
}


@dataclass(frozen=True)
class StateDictRequest:
    """Which state dict.

    Attributes:
        carrier: "whole" tensors; else what this rank has: an "interval", rows as "sharded_tensor" or "dtensor", or
            "fsdp1", as `carriers.carrier_of` says.
        offload_to_cpu: whether tensors go to the CPU.
        rank0_only: whether only the first rank gets a dict that is not empty; for whole tensors.
    """

    carrier: str
    offload_to_cpu: bool = True
    rank0_only: bool = False

    @property
    def device(self) -> torch.device | None:
        """Where tensors go; None for where they are."""
        return torch.device("cpu") if self.offload_to_cpu else None


def state_by_name(
    model: nn.Module,
    optim: torch.optim.Optimizer,
    state_dict: dict[str, Any] | None,
    wanted: StateDictRequest,
    *,
    optim_input: Any = None,
    group: Any = None,
) -> dict[str, Any]:
    """[Note: optimizer state dicts]. `state_dict`: the optimizer's own, if something else than `optim.state_dict()`.

    Collective over the axes of the model's units. No value shares memory with the optimizer's.
    """
    with collective_call(units_in(model), "optim_state_dict()", always=True):
        axes = axes_of(model)
        doing = DOING[wanted.carrier]
        made: list[_LocalState] = []
        keeps: list[bool] = []

        def report() -> tuple[bool, list[ParamReport]]:
            keeps.append(is_source(axes, group) or not wanted.rank0_only)
            made.append(_LocalState.of(model, optim, state_dict, groups_of(model, optim, optim_input)))
            return bool(made[-1].state), made[-1].reports()

        def step() -> list[ParamReport]:
            made.append(made[-1].with_state(state_before_first_step(optim, made[-1].holder.groups)))
            return made[-1].reports()

        answers = all_or_none(axes, report, doing=doing, objects=True)
        reports = {rank: found for rank, (_, found) in answers.items()}
        if not any(has_state for has_state, _ in answers.values()):
            reports = all_or_none(axes, step, doing=f"{doing}, before its first step", objects=True)
        assembly = _Assembly(made[-1], agree(reports), wanted, keeps=keeps[0])
        for unit, kind, members in made[-1].holder.by_handle():
            assembly.add(unit, kind, members)
        return assembly.state_dict() if keeps[0] else {}


def axes_of(model: nn.Module) -> list[Transport]:
    """The axes over which units of `model` are spread, each once. Collective if nothing collective came before."""
    units = units_in(model)
    for root in models_of(units):
        initialize(root)
    found: dict[int, Transport] = {}
    for unit in units:
        for axis in (unit.replicate, unit.gather):
            if axis is not None and axis.group.size > 1:
                found.setdefault(id(axis.group.process_group), axis)
    return list(found.values())


def is_source(axes: Sequence[Transport], group: Any) -> bool:
    """Whether this rank is the one that has what only one rank is to have: the first of `group`, else of the model."""
    if group is None:
        return is_first_of(axes)
    given = Axis.of(group, torch.device("cpu"))
    if given.rank < 0:
        raise ConfigValueError(f"group: this rank is not in it; its ranks are {list(given.ranks)}")
    if not set(given.ranks) <= set(ranks_over(axes) or given.ranks):
        raise ConfigValueError(
            f"group: expected ranks among {ranks_over(axes)}, over which the model is spread, found "
            f"{list(given.ranks)}; leave it out"
        )
    return given.rank == 0


class _LocalState:
    """What this rank's optimizer has.

    Attributes:
        state: by key; entries without states are left out.
        others: entries of the state that belong to no parameter.
    """

    def __init__(
        self,
        holder: ParamMap,
        state: Mapping[Key, dict[str, Any]],
        others: Mapping[Any, Any],
        param_groups: Sequence[Mapping[str, Any]] | None,
    ) -> None:
        self.holder = holder
        self.state = {key: entry for key, entry in state.items() if entry}
        self.others = others
        self._param_groups = param_groups
        self._held = {named.name: held for held in holder for named in held.params}

    @classmethod
    def of(
        cls,
        model: nn.Module,
        optim: torch.optim.Optimizer,
        state_dict: dict[str, Any] | None,
        groups: list[list[torch.Tensor]],
    ) -> _LocalState:
        own_dict = optim.state_dict() if state_dict is None else check_dict(state_dict)
        param_groups = own_dict.get("param_groups")
        if param_groups is None:
            names = {name for name, _ in model.named_parameters()}
            keys = [key for key in own_dict["state"] if key in names]
        else:
            keys = [key for each in param_groups for key in each["params"]]
        by_name = any(isinstance(key, str) for key in keys)
        holder = ParamMap(model, groups, by_name=by_name)
        if param_groups is not None and sorted(map(str, keys)) != sorted(str(held.key) for held in holder):
            raise ConfigValueError(
                f"optim_state_dict: its param groups have {len(keys)} parameters, those of the optimizer "
                f"{len(list(holder))}, or under other keys. Give the optimizer's own state_dict(), or leave it out"
            )
        known = {held.key for held in holder}
        state = {key: entry for key, entry in own_dict["state"].items() if key in known}
        others = {key: entry for key, entry in own_dict["state"].items() if key not in known}
        return cls(holder, state, others, param_groups)

    def with_state(self, state: Mapping[Key, dict[str, Any]]) -> _LocalState:
        """The same optimizer with another state."""
        return _LocalState(self.holder, state, self.others, self._param_groups)

    def reports(self) -> list[ParamReport]:
        """What this rank tells the others: of every parameter in units of which it has elements."""
        out = []
        for unit, kind, members in self.holder.by_handle():
            for named in _reporting(unit.handles[kind], members):
                held = self._held.get(named.name)
                if held is None:
                    if named.has_elements:
                        out.append(ParamReport(named.name, None))
                elif held.reports:
                    out.append(ParamReport(named.name, facts_of(held, self.state.get(held.key, {}))))
        return out

    def value(self, named: NamedParam, state: str, fact: Any) -> Any:
        """A copy of what `fact` says of a state that is not shaped."""
        if isinstance(fact, OtherState):
            return value_of(self.state[self._held[named.name].key][state] if fact.value is None else fact.value)
        return value_of(fact)

    def shard_of(
        self, handle: FlatParamHandle, having: Sequence[NamedParam], name: str, dtype: torch.dtype
    ) -> torch.Tensor:
        """One state of parameters of one handle, laid out like its shard."""
        first = self._held.get(having[0].name)
        if first is not None and first.is_flat:
            flat: torch.Tensor = self.state[first.key][name].detach()
            return flat
        shard = torch.zeros(handle.layout.shard_numel, dtype=dtype, device=handle.shard.device)
        for named in having:
            held = self._held.get(named.name)
            if held is None or not named.has_elements:
                continue
            value = self.state[held.key][name].detach()
            if handle.is_unsharded_at_rest:
                store(handle.layout, handle.rank, shard, named.index, value)
            else:
                named.local_view(shard).copy_(value)
        return shard

    def local_of(self, handle: FlatParamHandle, named: NamedParam, name: str, dtype: torch.dtype) -> torch.Tensor:
        """What this rank owns of one shaped state, in its parameter's memory order, 1-D; in place where it has that
        order."""
        if named.span_in_param.is_empty:
            return torch.empty(0, dtype=dtype)
        held = self._held[named.name]
        value: torch.Tensor = self.state[held.key][name].detach()
        if held.is_flat:
            return named.local_view(value)
        if not handle.is_unsharded_at_rest:
            return value
        spec = named.spec
        if value.is_contiguous() if spec.stride is None else value.stride() == spec.stride:
            return dense(value)
        interval = named.interval(value.new_empty(spec.numel))
        interval.take_from(value)
        return interval.local

    def param_groups(self) -> dict[str, list[dict[str, Any]]]:
        """The param groups with names in place of keys, as an entry of a state dict; none if they were not given."""
        if self._param_groups is None:
            return {}
        names = {held.key: [named.name for named in held.params] for held in self.holder}
        out = []
        for group in self._param_groups:
            covered = [name for key in group["params"] for name in names[key]]
            own = {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
            if "param_names" in own:
                own["param_names"] = list(covered)
            out.append({**own, "params": covered})
        return {"param_groups": out}


def _reporting(handle: FlatParamHandle, members: Sequence[NamedParam]) -> Sequence[NamedParam]:
    """Of the parameters of one handle those by whose names states are reported: all, or a flat parameter's first."""
    return members if handle.use_orig_params else [min(members, key=lambda named: named.index)]


def _by_name(handle: FlatParamHandle, members: Sequence[NamedParam], facts: Mapping[str, Facts]) -> dict[str, Facts]:
    """What was agreed on, for each parameter of one handle."""
    tellers = _reporting(handle, members)
    if len(tellers) == len(members):
        return {named.name: facts[named.name] for named in members if named.name in facts}
    found = facts.get(tellers[0].name)
    return {} if found is None else {named.name: found for named in members}


class _Assembly:
    """A state dict of names, as it is put together from what this rank's optimizer has and what all have agreed on.

    `keeps`: whether this rank is to have what is gathered.
    """

    def __init__(self, own: _LocalState, facts: Mapping[str, Facts], wanted: StateDictRequest, *, keeps: bool) -> None:
        self._own = own
        self._facts = facts
        self._wanted = wanted
        self._keeps = keeps
        self._state: defaultdict[str, dict[str, Any]] = defaultdict(dict)

    def add(self, unit: Unit, kind: int, members: Sequence[NamedParam]) -> None:
        """The states of the parameters of one handle. Collective where they are gathered."""
        facts = _by_name(unit.handles[kind], members, self._facts)
        if self._wanted.carrier == "interval":
            self._add_intervals(unit.handles[kind], members, facts)
        else:
            self._add_gathered(unit, kind, members, facts)
        for named in members:
            for name, fact in facts.get(named.name, {}).items():
                if not isinstance(fact, ParamShaped):
                    self._state[named.name][name] = self._own.value(named, name, fact)

    def _add_gathered(self, unit: Unit, kind: int, members: Sequence[NamedParam], facts: Mapping[str, Facts]) -> None:
        """The shaped states, whole or by rows, where this rank keeps them. Collective."""
        wanted, carrier = self._wanted, carrier_of(unit, self._wanted.carrier)
        for name, dtype in _shaped(facts):
            having = [named for named in members if facts.get(named.name, {}).get(name) == ParamShaped(dtype)]
            with consolidated(unit, kind, self._own.shard_of(unit.handles[kind], having, name, dtype)) as views:
                for named in having if self._keeps else ():
                    view = views[named.index]
                    self._state[named.name][name] = (
                        _copied(view, wanted.device)
                        if carrier == "whole"
                        else rows_of(view, unit, as_dtensor=carrier == "dtensor", offload_to_cpu=wanted.offload_to_cpu)
                    )

    def _add_intervals(
        self, handle: FlatParamHandle, members: Sequence[NamedParam], facts: Mapping[str, Facts]
    ) -> None:
        """What this rank owns of the shaped states."""
        for named in members:
            for name, fact in facts.get(named.name, {}).items():
                if isinstance(fact, ParamShaped):
                    local = self._own.local_of(handle, named, name, fact.dtype)
                    if not shares_memory():
                        local = local.to(self._wanted.device or handle.shard.device, copy=True)
                    self._state[named.name][name] = named.interval(local)

    def state_dict(self) -> dict[str, Any]:
        """All of it, in the order of the model's parameters, with the states of those outside of every unit."""
        own, state = self._own, self._state
        for held in own.holder:
            if held.handle is None and (values := own.state.get(held.key)):
                state[held.name] = {
                    name: value.detach()
                    if shares_memory() and isinstance(value, torch.Tensor)
                    else _copied(value, self._wanted.device)
                    for name, value in values.items()
                }
        ordered: dict[Any, Any] = {named.name: state[named.name] for named in own.holder.params if named.name in state}
        ordered |= {key: value_of(value) for key, value in own.others.items()}
        return {"state": ordered, **own.param_groups()}


def _shaped(facts: Mapping[str, Facts]) -> Iterator[tuple[str, torch.dtype]]:
    """Every shaped state with its dtype, once, in an order that all ranks share."""
    found = {
        (name, fact.dtype) for each in facts.values() for name, fact in each.items() if isinstance(fact, ParamShaped)
    }
    yield from sorted(found, key=str)


def _copied(value: Any, device: torch.device | None) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().to(device or value.device, copy=True)
    return value_of(value, device=device)
