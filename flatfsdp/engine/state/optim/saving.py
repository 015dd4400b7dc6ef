"""An optimizer's state by the names of the model's parameters: whole, or what this rank owns of it.

[Note: optimizer state dicts] {"state": {name: {state: value}}, "param_groups": [...]}, like that of an optimizer over
the model before it was wrapped, with names ([Note: clean names]) in place of numbers. Before anything is put together,
ranks tell each other what states they have (`facts`), because a rank knows nothing of parameters of which it owns
no element. Whole states are then gathered one state of one unit at a time; sharded ones need nothing more.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ....errors import ConfigValueError
from ...agreement.object_collectives import all_or_none, is_first_of, ranks_over
from ...comm.axes import Axis
from ...comm.transport import Transport
from ...flat.layout_views import dense
from ...runtime.module_tree import units_in
from ...runtime.rest import collective_call, initialize, models_of
from ..consolidate import consolidated, others_of, store
from ..model.distributed_values import carrier_of, rows_of
from ..model.fqns import NamedParam
from ..model.zero_copy import shares_memory
from ..owned_interval import OwnedInterval
from .descriptions import Facts, OtherState, ParamReport, ParamShaped, agree, facts_of, value_of
from .initial_state import state_before_first_step
from .load_plan import check_dict
from .param_map import (
    Key,
    OptimizedParam,
    ParamMap,
    groups_of,
    handle_of,
    has_elements,
    span_in_param,
    span_in_shard,
    spec_of,
)

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
        return _state_by_name(model, optim, state_dict, wanted, optim_input=optim_input, group=group)


def _state_by_name(
    model: nn.Module,
    optim: torch.optim.Optimizer,
    state_dict: dict[str, Any] | None,
    wanted: StateDictRequest,
    *,
    optim_input: Any,
    group: Any,
) -> dict[str, Any]:
    axes = axes_of(model)
    doing = DOING[wanted.carrier]
    made: list[_LocalState] = []
    source: list[bool] = []

    def tell() -> tuple[bool, list[ParamReport]]:
        source.append(is_source(axes, group))
        made.append(_LocalState.of(model, optim, state_dict, groups_of(model, optim, optim_input)))
        return bool(made[-1].state), made[-1].reports()

    def step() -> list[ParamReport]:
        made.append(made[-1].with_state(state_before_first_step(optim, made[-1].holder.groups)))
        return made[-1].reports()

    answers = all_or_none(axes, tell, doing=doing, objects=True)
    if any(has_state for has_state, _ in answers.values()):
        facts = agree({rank: reported for rank, (_, reported) in answers.items()})
    else:
        facts = agree(all_or_none(axes, step, doing=f"{doing}, before its first step", objects=True))
    own = made[-1]
    keeps = not wanted.rank0_only or source[0]
    state: dict[str, dict[str, Any]] = {}
    for members in own.holder.by_unit():
        agreed = _by_name(members, facts)
        if wanted.carrier == "interval":
            _add_intervals(own, members, agreed, state, wanted)
        else:
            _add_gathered(own, members, agreed, state, wanted, keeps=keeps)
        for named in members:
            for name, fact in agreed.get(named.name, {}).items():
                if not isinstance(fact, ParamShaped):
                    state.setdefault(named.name, {})[name] = own.value(named, name, fact)
    if not keeps:
        return {}
    for held in own.holder:
        if held.handle is None and (values := own.state.get(held.key)):
            state[held.name] = {
                name: value.detach()
                if shares_memory() and isinstance(value, torch.Tensor)
                else _copied(value, wanted.device)
                for name, value in values.items()
            }
    ordered: dict[Any, Any] = {named.name: state[named.name] for named in own.holder.params if named.name in state}
    ordered |= {key: value_of(value) for key, value in own.others.items()}
    return {"state": ordered, **own.param_groups()}


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
        for members in self.holder.by_unit():
            for named in _reporting_ranks(members):
                held = self._held.get(named.name)
                if held is None:
                    if has_elements(named):
                        out.append(ParamReport(named.name, None))
                elif held.reports:
                    out.append(ParamReport(named.name, facts_of(held, self.state.get(held.key, {}))))
        return out

    def held(self, named: NamedParam) -> OptimizedParam | None:
        """What the optimizer holds `named` in."""
        return self._held.get(named.name)

    def value(self, named: NamedParam, state: str, fact: Any) -> Any:
        """A copy of what `fact` says of a state that is not shaped."""
        if isinstance(fact, OtherState):
            return value_of(self.state[self._held[named.name].key][state] if fact.value is None else fact.value)
        return value_of(fact)

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


def _reporting_ranks(members: Sequence[NamedParam]) -> Sequence[NamedParam]:
    """Of the parameters of one handle those by whose names states are told: all, or the first for a flat parameter."""
    handle = handle_of(members[0])
    assert handle is not None
    return members if handle.use_orig_params else [min(members, key=lambda named: named.index)]


def _by_name(members: Sequence[NamedParam], facts: Mapping[str, Facts]) -> dict[str, Facts]:
    """What was agreed on, for each parameter of one handle."""
    tellers = _reporting_ranks(members)
    if len(tellers) == len(members):
        return {named.name: facts[named.name] for named in members if named.name in facts}
    found = facts.get(tellers[0].name)
    return {} if found is None else {named.name: found for named in members}


def _add_gathered(
    own: _LocalState,
    members: Sequence[NamedParam],
    facts: Mapping[str, Facts],
    state: dict[str, dict[str, Any]],
    wanted: StateDictRequest,
    *,
    keeps: bool,
) -> None:
    """Put the shaped states of one handle into `state`, whole or by rows, where this rank `keeps` them. Collective."""
    unit, kind = members[0].unit, members[0].kind
    assert unit is not None
    carrier = carrier_of(unit, wanted.carrier)
    for name, dtype in _shaped(facts):
        having = [named for named in members if facts.get(named.name, {}).get(name) == ParamShaped(dtype)]
        with consolidated(unit, kind, _shard_of(own, having, name, dtype)) as views:
            for named in having if keeps else ():
                view = views[named.index]
                state.setdefault(named.name, {})[name] = (
                    _copied(view, wanted.device)
                    if carrier == "whole"
                    else rows_of(view, unit, as_dtensor=carrier == "dtensor", offload_to_cpu=wanted.offload_to_cpu)
                )


def _shaped(facts: Mapping[str, Facts]) -> Iterator[tuple[str, torch.dtype]]:
    """Every shaped state with its dtype, once, in an order that all ranks share."""
    found = {
        (name, fact.dtype) for each in facts.values() for name, fact in each.items() if isinstance(fact, ParamShaped)
    }
    yield from sorted(found, key=str)


def _shard_of(own: _LocalState, having: Sequence[NamedParam], name: str, dtype: torch.dtype) -> torch.Tensor:
    """One state of parameters of one handle, laid out like its shard."""
    handle = handle_of(having[0])
    assert handle is not None
    first = own.held(having[0])
    if first is not None and first.is_flat:
        flat: torch.Tensor = own.state[first.key][name].detach()
        return flat
    shard = torch.zeros(handle.layout.shard_numel, dtype=dtype, device=handle.shard.device)
    for named in having:
        held = own.held(named)
        if held is None or not has_elements(named):
            continue
        value = own.state[held.key][name].detach()
        if handle.is_unsharded_at_rest:
            store(handle.layout, handle.rank, shard, named.index, value)
        else:
            shard[span_in_shard(named).slice].copy_(value)
    return shard


def _add_intervals(
    own: _LocalState,
    members: Sequence[NamedParam],
    facts: Mapping[str, Facts],
    state: dict[str, dict[str, Any]],
    wanted: StateDictRequest,
) -> None:
    """Put what this rank owns of the shaped states of one handle into `state`."""
    unit, handle = members[0].unit, handle_of(members[0])
    assert unit is not None and handle is not None
    for named in members:
        others = others_of(unit, named.kind, named.index)
        for name, fact in facts.get(named.name, {}).items():
            if isinstance(fact, ParamShaped):
                span = span_in_param(named)
                owned = torch.empty(0, dtype=fact.dtype) if span.is_empty else _owned(own, named, name)
                local = owned if shares_memory() else owned.to(wanted.device or handle.shard.device, copy=True)
                interval = OwnedInterval(local, spec_of(named), span, names_empty=handle.rank == 0, others=others)
                state.setdefault(named.name, {})[name] = interval


def _owned(own: _LocalState, named: NamedParam, state: str) -> torch.Tensor:
    """What this rank owns of one shaped state, in its parameter's memory order, 1-D; in place where it has that
    order."""
    held, handle = own.held(named), handle_of(named)
    assert held is not None and handle is not None
    value: torch.Tensor = own.state[held.key][state].detach()
    if held.is_flat:
        return value[span_in_shard(named).slice]
    if not handle.is_unsharded_at_rest:
        return value
    spec = spec_of(named)
    if value.is_contiguous() if spec.stride is None else value.stride() == spec.stride:
        return dense(value)
    interval = OwnedInterval(value.new_empty(spec.numel), spec, span_in_param(named))
    interval.take_from(value)
    return interval.local


def _copied(value: Any, device: torch.device | None) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().to(device or value.device, copy=True)
    return value_of(value, device=device)
