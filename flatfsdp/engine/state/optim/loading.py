"""From an optimizer's state dict of names to the state for this rank's optimizer. [Note: loading optimizer state]

A rank with a full tensor, or the interval that it owns, gets its piece without communication; from the first rank each
rank gets its shard, one state of one unit at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from ....errors import AgreementError, ConfigValueError, UsageError, by_ranks
from ...agreement.object_collectives import all_or_none, is_first_of, ranks_over
from ...base.hashing import hash63
from ...base.plain_data import encode
from ...comm.transport import Transport
from ...runtime.module_tree import units_in
from ...runtime.rest import collective_call
from ...runtime.unit import Unit
from ..consolidate import is_first, scatter_from_first, store
from ..from_rank0 import broadcast_value
from ..model.distributed_values import is_distributed, whole_if_distributed
from ..named_param import NamedParam, by_handle
from ..parts import axes_beside, broadcast_tensor
from .descriptions import ParamShaped, value_of
from .load_plan import LoadPlan, StateDictSpec, TensorSpec, describe, plan
from .param_map import Key, OptimizedParam, ParamMap, groups_of, others_of
from .saving import initialized_axes, is_source, shaped_states

DOING = "loads the state of an optimizer"
FROM_FIRST = "loads the state of an optimizer from the first rank"


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
    """The argument for an optimizer's own `load_state_dict()`.

    Args:
        optim, optim_input: either gives the parameters that it has ([Note: optimized parameters]).
        from_first: only the first rank has `state_dict`; other ranks' are ignored.
        by_name: the optimizer's keys are names, not numbers.
        alone: without communication; `state_dict` holds full tensors, or the intervals that this rank owns.
        group: the process group whose first rank has it; that must be the model's first.

    No value shares memory with `state_dict`'s. Collective over the axes of the model's units unless `alone`.

    Raises:
        ConfigTypeError, ConfigValueError: the dict is faulty; on all ranks that have it.
        AgreementError: ranks have different dicts, or another rank has a wrong one.
    """
    with collective_call(units_in(model), "optim_state_dict_to_load()", always=True, when=not alone):
        axes = [] if alone else initialized_axes(model)
        from_first = from_first and bool(axes)
        description = _description_of_first(model, axes, state_dict, group) if from_first else None
        loading = _Loading(axes, from_first=from_first)

        def prepare() -> int:
            loading.description = describe(state_dict) if description is None else description
            loading.holder = ParamMap(model, groups_of(model, optim, optim_input), by_name=by_name)
            loading.plan = plan(loading.holder, loading.description, frozenset(others_of(optim)))
            return hash63(repr(loading.common()))

        digests = all_or_none(axes, prepare, doing=DOING)
        if len(set(digests.values())) > 1:
            _refuse_difference(all_or_none(axes, loading.common, doing=DOING))
        source = state_dict["state"] if not from_first or is_first_of(axes) else {}
        loadable: dict[str, Any] = {"state": {**loading.states(source), **loading.plan.others}}
        groups = loading.plan.param_groups
        return loadable if groups is None else {**loadable, "param_groups": groups}


def _description_of_first(model: nn.Module, axes: list[Transport], state_dict: Any, group: Any) -> StateDictSpec:
    """A description of the first rank's `state_dict`. Collective over `axes`.

    Raises:
        AgreementError, ConfigTypeError, ConfigValueError, UsageError: it is not such a dict, or cannot reach all ranks.
    """
    ranks, first = ranks_over(axes), is_first_of(axes)
    own: list[StateDictSpec] = []

    def look() -> None:
        if is_source(axes, group) is not first:
            raise ConfigValueError(
                f"group: its first rank must be rank {ranks[0]}, the first rank of the model, which has the dict; "
                "omit this argument"
            )
        for unit in units_in(model) if not first else ():
            if any(is_first(groups) and is_first_of(axes_beside(unit, groups)) for groups in unit.axes.all):
                raise UsageError(
                    f"unit {unit.label} is sharded over ranks that do not include rank {ranks[0]}, which has the "
                    "state and sends it only to ranks with which it shares a unit. Load the dict on every rank, and "
                    "call shard_full_optim_state_dict()"
                )
        if first:
            own.append(describe(state_dict).to_cpu())
            encode(own[0], objects=True)  # unsendable values are refused here, on all ranks

    all_or_none(axes, look, doing=FROM_FIRST)
    described: StateDictSpec = broadcast_value(axes, own[0] if first else None)
    return described


def _refuse_difference(reported: Mapping[int, list[tuple[str, str]]]) -> NoReturn:
    """Raise an AgreementError with the first difference between ranks' reports."""
    by_name = {rank: dict(each) for rank, each in reported.items()}
    for name in sorted({name for each in by_name.values() for name in each}):
        found = {rank: each.get(name, "no state") for rank, each in by_name.items()}
        if len(set(found.values())) > 1:
            break
    raise AgreementError(
        f"optim_state_dict: ranks have different dicts; the first difference is in {name!r}: {by_ranks(found)}. Load "
        "the same dict on all ranks, or only on rank 0 with FullOptimStateDictConfig(rank0_only=True)"
    )


class _Loading:
    """The plan for an optimizer's state, and then its tensors.

    Attributes:
        description: of the dict.
        holder: the parameters that the optimizer steps on.
        plan: the plan for each value.
    """

    description: StateDictSpec
    holder: ParamMap
    plan: LoadPlan

    def __init__(self, axes: Sequence[Transport], *, from_first: bool) -> None:
        self._axes = axes
        self._from_first = from_first
        self._source: Mapping[str, Any] = {}

    def common(self) -> list[tuple[str, str]]:
        """The facts that all ranks' dicts must share: (name, description of its tensors) of parameters in units."""
        outside = {name for named in self.holder.params if named.unit is None for name in named.names}
        found = []
        for name, values in self.description.state.items():
            if isinstance(values, dict) and name not in outside:
                tensors = sorted(f"{s} {v.shape} {v.dtype}" for s, v in values.items() if isinstance(v, TensorSpec))
                found.append((str(name), ", ".join(tensors) or "no tensors"))
        return sorted(found)

    def states(self, source: Mapping[str, Any]) -> dict[Key, dict[str, Any]]:
        """The states that the optimizer loads, by its keys. Collective over the axes if there are any.

        Parameters of which this rank has no element are left out, as by optimizers that step on gradients alone; an
        optimizer that uses names gets all.

        Args:
            source: the state of the dict; empty on ranks that do not have it.
        """
        self._source = source
        by_name = self.holder.by_name
        out: dict[Key, dict[str, Any]] = {}
        for unit, kind, members in by_handle(self.holder.params):
            handle = unit.handles[kind]
            inside = list({id(by_name[n.name]): by_name[n.name] for n in members if n.name in by_name}.values())
            for state, dtype in shaped_states(map(self._planned, inside)):
                having = [each for each in inside if self._planned(each).get(state) == ParamShaped(dtype)]
                shard = self._shard(unit, kind, [named for each in having for named in each.params], state, dtype)
                pieces = handle.at_rest.views_of(shard)
                for each in having:
                    piece = shard if each.is_flat else each.like_holder(pieces[each.params[0].index].clone())
                    out.setdefault(each.key, {})[state] = piece
        for named in self.holder.params:
            param = by_name.get(named.name)
            if param is None or param.params[0] is not named:
                continue
            for state, value in self._planned(param).items():
                if not isinstance(value, ParamShaped):
                    replicated = isinstance(value, TensorSpec)
                    taken = self._replicated(param, state, value) if replicated else value_of(value)
                    out.setdefault(param.key, {})[state] = taken
        return {
            each.key: {state: out[each.key][state] for state in self._planned(each)}
            for each in self.holder
            if each.key in out and (each.reports or isinstance(each.key, str))
        }

    def _planned(self, param: OptimizedParam) -> dict[str, Any]:
        return self.plan.states.get(param.key, {})

    def _value(self, named: NamedParam, state: str) -> Any:
        """The tensor of the dict; None if it has none."""
        key = self.plan.sources.get(named.name)
        return None if key is None or not self._source else self._source[key].get(state)

    def _shard(
        self, unit: Unit, kind: int, wanted: Sequence[NamedParam], state: str, dtype: torch.dtype
    ) -> torch.Tensor:
        """One state of one handle, laid out like its shard."""
        handle = unit.handles[kind]
        if self._from_first:
            wholes = {named.index: self._value(named, state) for named in wanted}
            return scatter_from_first(unit, kind, wholes, dtype=dtype).to(handle.shard.device)
        shard = torch.zeros(handle.layout.shard_numel, dtype=dtype, device=handle.shard.device)
        for named in wanted:
            value = self._value(named, state)
            if value is not None:
                store(handle.layout, handle.rank, shard, named.index, whole_if_distributed(value))
        return shard

    def _replicated(self, param: OptimizedParam, state: str, spec: TensorSpec) -> torch.Tensor:
        """A tensor of the dict, unchanged, on the parameter's device."""
        value, device = self._value(param.params[0], state), param.at_rest.device
        if self._from_first:
            value = broadcast_tensor(self._axes, value, spec.shape, spec.dtype, self._axes[0].device.device)
        elif not is_distributed(param.parameter):
            value = whole_if_distributed(value)
        copied: torch.Tensor = value.detach().to(device, copy=True)
        return copied
