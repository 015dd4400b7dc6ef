"""From an optimizer's state dict of names to what this rank's optimizer loads. [Note: loading optimizer state]

A rank that has a whole tensor, or the interval that it owns, needs nobody for its piece; from the first rank each rank
gets its shard, one state of one unit at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from ....errors import AgreementError, ConfigValueError, UsageError, by_ranks
from ...agreement.object_collectives import all_or_none, firsts, is_first_of, ranks_over
from ...base.hashing import hash63
from ...base.plain_data import decode, encode
from ...comm.transport import Transport
from ...flat.layout_views import full_views
from ...runtime.module_tree import units_in
from ...runtime.rest import collective_call
from ...runtime.unit import Unit
from ..consolidate import is_first, scatter, store
from ..model.distributed_values import is_distributed, whole_of
from ..named_param import NamedParam
from .descriptions import value_of
from .load_plan import LoadPlan, ReplicatedState, ShardedState, StateDictSpec, TensorSpec, describe, plan
from .param_map import Key, OptimizedParam, ParamMap, groups_of, others_of
from .saving import axes_of, is_source

DOING = "loads the state of an optimizer"
FROM_FIRST = "loads the state of an optimizer that the first rank has"


def load(
    model: nn.Module,
    optim: torch.optim.Optimizer | None,
    state_dict: Any,
    *,
    optim_input: Any = None,
    from_first: bool = False,
    by_name: bool = False,
    alone: bool = False,
    group: Any = None,
) -> dict[str, Any]:
    """What an optimizer loads by its own `load_state_dict()`.

    Args:
        optim, optim_input: what says which parameters it has ([Note: held]).
        from_first: only the first rank has `state_dict`; that of others is not looked at.
        by_name: the optimizer's keys are names, not numbers.
        alone: without communication; `state_dict` holds whole tensors, or the intervals that this rank owns.
        group: the process group whose first rank has it; that must be the model's first.

    No value shares memory with `state_dict`'s. Collective over the axes of the model's units unless `alone`.

    Raises:
        ConfigTypeError, ConfigValueError: what is wrong with the dict; on all ranks that are asked.
        AgreementError: ranks have different dicts, or another rank has a wrong one.
    """
    with collective_call(units_in(model), "optim_state_dict_to_load()", always=True, when=not alone):
        axes = [] if alone else axes_of(model)
        from_first = from_first and bool(axes)
        described = [_description_of_first(model, axes, state_dict, group)] if from_first else []
        made: list[tuple[ParamMap, LoadPlan]] = []

        def prepare() -> int:
            if not described:
                described.append(describe(state_dict))
            holder = ParamMap(model, groups_of(model, optim, optim_input), by_name=by_name)
            made.append((holder, plan(holder, described[0], frozenset(others_of(optim)))))
            return hash63(repr(_told(holder, described[0])))

        digests = all_or_none(axes, prepare, doing=DOING)
        ((holder, planned),) = made
        if len(set(digests.values())) > 1:
            _refuse_difference(all_or_none(axes, lambda: _told(holder, described[0]), doing=DOING))
        source = state_dict["state"] if not from_first or is_first_of(axes) else {}
        loadable: dict[str, Any] = {
            "state": {**_Filler(holder, planned, source, axes, from_first=from_first).states(), **planned.others}
        }
        return loadable if planned.param_groups is None else {**loadable, "param_groups": planned.param_groups}


def _description_of_first(model: nn.Module, axes: list[Transport], state_dict: Any, group: Any) -> StateDictSpec:
    """What the first rank's `state_dict` holds. Collective over `axes`.

    Raises:
        AgreementError, ConfigTypeError, ConfigValueError, UsageError: it is no such dict, or cannot reach all ranks.
    """
    ranks = ranks_over(axes)
    packed: list[bytes] = []

    def look() -> None:
        if is_source(axes, group) is not is_first_of(axes):
            raise ConfigValueError(
                f"group: its first rank must be rank {ranks[0]}, the first over which the model is spread, which has "
                "the dict; leave it out"
            )
        for unit in units_in(model) if not is_first_of(axes) else ():
            if is_first(unit):
                raise UsageError(
                    f"unit {unit.label} is spread over ranks without rank {ranks[0]}, which has the state, and sends "
                    "it to the ranks that it shares a unit with. Give every rank the dict, and call "
                    "shard_full_optim_state_dict()"
                )
        if is_first_of(axes):
            packed.append(encode(describe(state_dict).to_cpu(), objects=True))

    all_or_none(axes, look, doing=FROM_FIRST)
    described: StateDictSpec = decode(firsts(axes, b"".join(packed)), objects=True)
    return described


def _told(holder: ParamMap, description: StateDictSpec) -> list[tuple[str, str]]:
    """What ranks must have in common, where each has a dict: (name, tensors in words) of what is in units."""
    outside = {name for named in holder.params if named.unit is None for name in named.names}
    reported = []
    for name, values in description.state.items():
        if isinstance(values, dict) and name not in outside:
            tensors = sorted(f"{s} {v.shape} {v.dtype}" for s, v in values.items() if isinstance(v, TensorSpec))
            reported.append((str(name), ", ".join(tensors) or "no tensors"))
    return sorted(reported)


def _refuse_difference(reported: Mapping[int, list[tuple[str, str]]]) -> NoReturn:
    """Raise an AgreementError with the first difference between what ranks hand in."""
    by_name = {rank: dict(each) for rank, each in reported.items()}
    for name in sorted({name for each in by_name.values() for name in each}):
        found = {rank: each.get(name, "no state") for rank, each in by_name.items()}
        if len(set(found.values())) > 1:
            break
    raise AgreementError(
        f"optim_state_dict: ranks have different dicts; the first difference is in {name!r}: {by_ranks(found)}. Load "
        "the same on all ranks, or on rank 0 only, with FullOptimStateDictConfig(rank0_only=True)"
    )


class _Filler:
    """Tensors by plan. `source`: the state of the dict, empty where only the first rank has it."""

    def __init__(
        self,
        holder: ParamMap,
        planned: LoadPlan,
        source: Mapping[str, Any],
        axes: Sequence[Transport],
        *,
        from_first: bool,
    ) -> None:
        self._holder = holder
        self._plan = planned
        self._source = source
        self._axes = axes
        self._from_first = from_first

    def states(self) -> dict[Key, dict[str, Any]]:
        """What the optimizer loads, by its keys. Collective over the axes if there are any.

        Parameters of which this rank has no element are left out, as optimizers do that step on gradients alone; those
        that go by names have all.
        """
        by_name = {named.name: held for held in self._holder for named in held.params}
        out: dict[Key, dict[str, Any]] = {}
        for unit, kind, members in self._holder.by_handle():
            held = list({id(by_name[n.name]): by_name[n.name] for n in members if n.name in by_name}.values())
            for state, dtype in self._cuts(held):
                having = [each for each in held if self._planned(each).get(state) == ShardedState(dtype)]
                shard = self._shard(unit, kind, having, state, dtype)
                for each in having:
                    out.setdefault(each.key, {})[state] = _piece(each, shard)
        for named in self._holder.params:
            found = by_name.get(named.name)
            if found is None or found.params[0] is not named:
                continue
            for state, value in self._planned(found).items():
                if not isinstance(value, ShardedState):
                    taken = self._taken(found, state, value) if isinstance(value, ReplicatedState) else value_of(value)
                    out.setdefault(found.key, {})[state] = taken
        return {
            each.key: {state: out[each.key][state] for state in self._planned(each)}
            for each in self._holder
            if each.key in out and (each.reports or isinstance(each.key, str))
        }

    def _planned(self, held: OptimizedParam) -> dict[str, Any]:
        return self._plan.states.get(held.key, {})

    def _cuts(self, held: Sequence[OptimizedParam]) -> list[tuple[str, torch.dtype]]:
        """Every state that is cut, with its dtype, in an order that all ranks share."""
        found = {(s, v.dtype) for each in held for s, v in self._planned(each).items() if isinstance(v, ShardedState)}
        return sorted(found, key=str)

    def _value(self, named: NamedParam, state: str) -> Any:
        """The tensor of the dict; None where it has none."""
        source = self._plan.sources.get(named.name)
        return None if source is None or not self._source else self._source[source].get(state)

    def _shard(
        self, unit: Unit, kind: int, having: Sequence[OptimizedParam], state: str, dtype: torch.dtype
    ) -> torch.Tensor:
        """One state of one handle, laid out like its shard."""
        handle = unit.handles[kind]
        wanted = [named for each in having for named in each.params]
        if self._from_first:
            whole: list[torch.Tensor | None] = [None] * len(handle.leaves)
            for named in wanted:
                whole[named.index] = self._value(named, state)
            return scatter(unit, kind, whole, dtype=dtype).to(handle.shard.device)
        shard = torch.zeros(handle.layout.shard_numel, dtype=dtype, device=handle.shard.device)
        for named in wanted:
            value = self._value(named, state)
            if value is not None:
                found = whole_of(value) if is_distributed(value) else value
                store(handle.layout, handle.rank, shard, named.index, found)
        return shard

    def _taken(self, held: OptimizedParam, state: str, value: ReplicatedState) -> torch.Tensor:
        """A tensor as the dict has it, where the parameter is."""
        handle = held.handle
        param_ref = held.parameter.device if handle is None else handle.shard.device
        if not self._from_first:
            found = self._value(held.params[0], state)
            if is_distributed(found) and not is_distributed(held.parameter):
                found = whole_of(found)
            return found.detach().to(param_ref, copy=True)
        tensor = torch.empty(value.shape, dtype=value.dtype, device=self._axes[0].device.device)
        if is_first_of(self._axes):
            tensor.copy_(self._value(held.params[0], state))
        for axis in self._axes:
            axis.broadcast(tensor)
        return tensor.to(param_ref)


def _piece(held: OptimizedParam, shard: torch.Tensor) -> torch.Tensor:
    """The state of one parameter out of that of its handle, in memory of its own."""
    handle = held.handle
    assert handle is not None
    if held.is_flat:
        return shard
    if handle.is_unsharded_at_rest:
        return full_views(shard, handle.layout)[held.params[0].index].clone()
    return held.params[0].local_view(shard).clone()
