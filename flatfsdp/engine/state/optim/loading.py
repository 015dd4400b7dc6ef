"""From an optimizer's state dict of names to the state for this rank's optimizer.

[Note: loading optimizer state] First a plan for each value is made from names, shapes, dtypes and the small values
(`describe`, `plan`). All refusals are here: ranks that have the same dict refuse the same, and if only the first rank
has it, the others need only its description. Then tensors are cut (`load`): a rank with a full tensor, or the interval
that it owns, gets its piece without communication; from the first rank each rank gets its shard, one state of one unit
at a time.
"""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn

from ....errors import AgreementError, ConfigValueError, UsageError, by_ranks, did_you_mean
from ...agreement.object_collectives import all_or_none, is_first_of, ranks_over
from ...base.fqns import clean
from ...base.hashing import hash63
from ...base.plain_data import encode
from ...comm.transport import Transport
from ...flat.faces import FlatFace
from ...guards.optimizer_hooks import wholes_of
from ...layout.layout import Span
from ...models.rest import collective_call
from ...models.walks import units_in
from ...parts.part import is_whole
from ...runtime.unit import Unit
from ..consolidate import is_first, scatter_from_first, store
from ..from_rank0 import broadcast_value
from ..model.distributed_values import described, is_distributed, whole_if_distributed
from ..named_param import NamedParam, by_handle
from ..owned_interval import OwnedInterval
from ..parts import axes_beside, broadcast_tensor
from .descriptions import KeptWhole, ParamShaped, alike, shown, value_of
from .param_map import Key, OptimizedParam, ParamMap, check_dict, groups_of, others_of
from .saving import initialized_axes, is_source, shaped_states

DOING = "loads the state of an optimizer"
FROM_FIRST = "loads the state of an optimizer from the first rank"


@dataclass(frozen=True)
class TensorSpec:
    """A tensor of a state dict. `span`: the elements that an `OwnedInterval` has."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    span: Span | None = None


Values = dict[str, Any]  # by the name of the state: a TensorSpec, or the value itself


@dataclass(frozen=True)
class StateDictSpec:
    """A state dict without its tensors."""

    state: dict[str, Any]  # Values by the name of the parameter; entries that are not dicts belong to no parameter
    param_groups: list[dict[str, Any]] | None

    def to_cpu(self) -> StateDictSpec:
        """The same for another rank, whose accelerator may differ."""
        return StateDictSpec(self.state, None if self.param_groups is None else value_of(self.param_groups))


@dataclass(frozen=True)
class LoadPlan:
    """The values that an optimizer will load.

    Attributes:
        states: by the optimizer's key, for each state `ParamShaped` if each rank gets its elements, the `TensorSpec`
            of a tensor that every rank gets unchanged, or the value itself.
        sources: the dict's key for the states of a parameter, by its name.
        others: entries that belong to no parameter.
        param_groups: in the optimizer's structure, with its own keys; None if the dict has none.
    """

    states: dict[Key, dict[str, Any]]
    sources: dict[str, str]
    others: dict[Any, Any]
    param_groups: list[dict[str, Any]] | None


def describe(state_dict: Any) -> StateDictSpec:
    """A description of `state_dict`. No communication.

    Raises:
        ConfigTypeError, ConfigValueError: it is not an optimizer's, or keyed by numbers.
    """
    checked = check_dict(state_dict)
    param_groups = checked.get("param_groups")
    numbers = [key for key in checked["state"] if isinstance(key, int)]
    numbers += [key for group in param_groups or () for key in group["params"] if isinstance(key, int)]
    if numbers:
        raise ConfigValueError(
            f"optim_state_dict: its parameters are identified by numbers ({numbers[0]}, ...); expected names. This is "
            "an optimizer's own state_dict(): load it with that optimizer, or convert it to names with "
            "rekey_optim_state_dict(..., OptimStateKeyType.PARAM_NAME, model) with the model that it was made for"
        )
    state = {
        key: {name: _described(value) for name, value in entry.items()} if isinstance(entry, dict) else value_of(entry)
        for key, entry in checked["state"].items()
    }
    groups = None if param_groups is None else [copy.deepcopy(dict(group)) for group in param_groups]
    return StateDictSpec(state, groups)


def _described(value: Any) -> Any:
    if isinstance(value, OwnedInterval):
        return TensorSpec(tuple(value.shape), value.dtype, value.span)
    if is_distributed(value) or (isinstance(value, torch.Tensor) and value.dim()):
        shape, dtype = described(value)
        return TensorSpec(tuple(shape), dtype)
    return value_of(value)


def plan(
    param_map: ParamMap, description: StateDictSpec, others: Collection[Any] = (), *, any_shape: bool = False
) -> LoadPlan:
    """The plan for an optimizer over `param_map`'s parameters. No communication.

    `others`: entries of the optimizer's state that belong to no parameter. `any_shape`: it steps on whole matrices, so
    that each rank can have states of other shapes.

    Raises:
        ConfigValueError: a name of no parameter of the optimizer, or states that do not fit; the message names them.
    """
    by_name = {name: named for named in param_map.params for name in named.names}
    beside = {key for key, entry in description.state.items() if key in others or not isinstance(entry, dict)}
    found: dict[str, Values] = {}
    sources: dict[str, str] = {}
    foreign: list[str] = []
    for key, entry in description.state.items():
        if key in beside:
            continue
        named = by_name.get(clean(str(key)))
        if named is None:
            foreign.append(str(key))
        else:
            found[named.name], sources[named.name] = entry, key
    given = description.param_groups
    listed = [[(name, by_name.get(clean(str(name)))) for name in group["params"]] for group in given or ()]
    foreign += [str(name) for group in listed for name, named in group if named is None and str(name) not in foreign]
    if foreign:
        raise ConfigValueError(
            f"optim_state_dict: the model has no parameters named {_few(foreign)}. "
            f"{did_you_mean(foreign[0], by_name)} Load a dict of this model, or rename or remove these".replace(
                "  ", " "
            )
        )
    groups = [[named.name for _, named in group if named is not None] for group in listed]
    unheld = sorted({*found, *(name for group in groups for name in group)} - param_map.by_name.keys())
    if unheld:
        raise ConfigValueError(
            f"optim_state_dict: it has {_few(unheld)}, which this optimizer does not hold. Remove them from the "
            "dict's state and param groups, or build the optimizer with them, too"
        )
    shaped = {
        state
        for values in found.values()
        for state, value in values.items()
        if isinstance(value, TensorSpec) and value.shape
    }
    states: dict[Key, dict[str, Any]] = {}
    for param in param_map:
        entries = {
            named.name: _with_scalars_shaped(named, found[named.name], shaped)
            for named in param.params
            if named.name in found
        }
        planned = _of_flat(param, entries) if param.is_flat else _of_one(param, entries.get(param.name, {}), any_shape)
        if planned:
            states[param.key] = planned
    kept = {key: description.state[key] for key in description.state if key in beside}
    return LoadPlan(states, sources, kept, None if given is None else _groups(param_map, given, groups))


def _with_scalars_shaped(named: NamedParam, values: Values, shaped: Collection[str]) -> Values:
    """`values` of a parameter without dimensions. Its states of its own shape look like single values: they are those
    that other parameters have in their shape or, if none has any, all but the step count."""
    if named.unit is None or named.spec.shape:
        return values
    return {
        state: TensorSpec((), value.dtype)
        if isinstance(value, torch.Tensor) and (state in shaped if shaped else state != "step")
        else value
        for state, value in values.items()
    }


def _of_one(param: OptimizedParam, values: Values, any_shape: bool) -> dict[str, Any]:
    named = param.params[0]
    if param.handle is None:
        return values
    spec = named.spec.whole
    planned: dict[str, Any] = {}
    for state, value in values.items():
        if not isinstance(value, TensorSpec):
            planned[state] = value
        elif value.shape == spec.shape:
            _check_interval(named, state, value)
            planned[state] = ParamShaped(value.dtype)
        elif any_shape or _owned_by_one(named):
            planned[state] = value
        else:
            raise ConfigValueError(
                f"optim_state_dict: state {state!r} of {named.name!r} has shape {value.shape}, the parameter "
                f"{spec.shape}. The parameter is split over ranks here, and only states of its shape can be split "
                "with it"
            )
    return planned


def _of_flat(param: OptimizedParam, entries: Mapping[str, Values]) -> dict[str, Any]:
    """The states that a flat parameter loads from those of the parameters in it: zeros where there is no tensor.

    Parameters without elements do not count: whether optimizers have states of them depends on how they are wrapped.
    """
    members = [named for named in param.params if named.spec.whole.numel] or list(param.params)
    entries = {named.name: entries[named.name] for named in members if named.name in entries}
    if not entries:
        return {}
    first, *others = entries
    for name in others:
        if entries[name].keys() != entries[first].keys():
            raise ConfigValueError(
                f"optim_state_dict: {first!r} has the states {_few(sorted(entries[first]))}, {name!r} has "
                f"{_few(sorted(entries[name]))}. {_SHARE}"
            )
    planned: dict[str, Any] = {}
    for state in entries[first]:
        values = {name: entry[state] for name, entry in entries.items() if entry[state] is not None}
        if not values:
            planned[state] = None
        elif any(isinstance(value, TensorSpec) for value in values.values()):
            planned[state] = _cut_of_flat(members, state, values)
        else:
            planned[state] = _value_of_flat(members, state, values)
    return planned


_SHARE = (
    "They are parts of one flat parameter, so they share their states: give them the same states, or "
    f"{FlatFace.words.remedy}, so that each has its own"
)


def _cut_of_flat(members: Sequence[NamedParam], state: str, values: Mapping[str, Any]) -> ParamShaped:
    dtypes: dict[torch.dtype, str] = {}
    for named in members:
        value = values.get(named.name)
        if value is None:
            continue
        spec = named.spec.whole
        if not isinstance(value, TensorSpec):
            other = next(name for name, each in values.items() if isinstance(each, TensorSpec))
            raise ConfigValueError(
                f"optim_state_dict: state {state!r} of {other!r} is a tensor, that of {named.name!r} is "
                f"{shown(value)}. {_SHARE}"
            )
        if value.shape != spec.shape:
            raise ConfigValueError(
                f"optim_state_dict: state {state!r} of {named.name!r} has shape {value.shape}, the parameter "
                f"{spec.shape}. In a flat parameter, states must have the shape of their parameter"
            )
        _check_interval(named, state, value)
        dtypes.setdefault(value.dtype, named.name)
    if len(dtypes) > 1:
        reported = ", ".join(f"{dtype} for {name!r}" for dtype, name in dtypes.items())
        raise ConfigValueError(f"optim_state_dict: state {state!r} has different dtypes: {reported}. {_SHARE}")
    return ParamShaped(next(iter(dtypes)))


def _value_of_flat(members: Sequence[NamedParam], state: str, values: Mapping[str, Any]) -> Any:
    first = next(iter(values))
    missing = [named.name for named in members if named.name not in values]
    if missing:
        raise ConfigValueError(
            f"optim_state_dict: state {state!r} is {shown(values[first])} for {first!r} and missing for "
            f"{_few(missing)}; a missing state has no default value. {_SHARE}"
        )
    for name, value in values.items():
        if not alike(value, values[first]):
            raise ConfigValueError(
                f"optim_state_dict: state {state!r} is {shown(values[first])} for {first!r}, and {shown(value)} for "
                f"{name!r}. {_SHARE}"
            )
    return values[first]


def _check_interval(named: NamedParam, state: str, value: TensorSpec) -> None:
    span = named.span_in_param
    if value.span is not None and not span.is_empty and value.span not in (span, Span(0, named.spec.numel)):
        raise ConfigValueError(
            f"optim_state_dict: state {state!r} of {named.name!r} holds elements {value.span}, "
            f"but this rank owns {span}: it was created on a different number of ranks or with a different wrapping. "
            "Save and load it with torch.distributed.checkpoint, into the sharded state dict of this optimizer"
        )


def _owned_by_one(named: NamedParam) -> bool:
    """Whether one rank owns all elements; the same result on every rank."""
    layout = named.handle.layout
    if not is_whole(named.spec.part):
        return False
    span = layout.spans[named.index]
    segment = layout.segments[bisect_right(layout.segments, span.start, key=lambda each: each.span.start) - 1].span
    piece = segment.numel // layout.world
    return span.is_empty or (span.start - segment.start) // piece == (span.stop - 1 - segment.start) // piece


def _groups(
    param_map: ParamMap, given: Sequence[Mapping[str, Any]], names: Sequence[Sequence[str]]
) -> list[dict[str, Any]]:
    """The dict's param groups in the optimizer's structure: split and merged as far as their settings allow. Parameters
    that no unit manages may be missing, such as a part of the model that each rank keeps to itself."""
    group_of = {name: number for number, group in enumerate(names) for name in group}
    out = []
    for number, group in enumerate(param_map.groups):
        missing = [n.name for param in group for n in param.params if n.unit is not None and n.name not in group_of]
        if missing:
            raise ConfigValueError(
                f"optim_state_dict: none of its param groups has {_few(missing)}, which this optimizer holds in its "
                f"param group {number}. Add them to the dict's param groups, or build the optimizer without them"
            )
        covered = (named.name for param in group for named in param.params)
        sources = sorted({group_of[name] for name in covered if name in group_of})
        if not sources:  # no parameter of it is known: its position decides
            sources = [number] if number < len(given) else []
        settings = [{key: value for key, value in given[source].items() if key not in _KEYS} for source in sources]
        for other, source in zip(settings[1:], sources[1:], strict=True):
            unlike = [key for key in settings[0] if not alike(settings[0][key], other.get(key))]
            if unlike:
                raise ConfigValueError(
                    f"optim_state_dict: param group {number} of this optimizer has parameters of its param groups "
                    f"{sources[0]} and {source}, which differ in {_few(unlike)}. Build the optimizer with the same "
                    f"param groups as in the dict; with {FlatFace.words.setting}, a flat parameter belongs to one "
                    "group"
                )
        merged = copy.deepcopy(settings[0]) if settings else {}
        out.append({**merged, "params": [param.key for param in group]})
    return out


_KEYS = frozenset({"params", "param_names"})


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(map(repr, names[:5])) + more


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
            loading.param_map = ParamMap(model, groups_of(model, optim, optim_input), by_name=by_name)
            loading.any_shape = optim is not None and wholes_of(optim) is not None
            others = frozenset(others_of(optim))
            loading.plan = plan(loading.param_map, loading.description, others, any_shape=loading.any_shape)
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
        param_map: the parameters that the optimizer steps on.
        plan: the plan for each value.
        any_shape: whether the optimizer steps on whole matrices.
    """

    description: StateDictSpec
    param_map: ParamMap
    plan: LoadPlan
    any_shape = False

    def __init__(self, axes: Sequence[Transport], *, from_first: bool) -> None:
        self._axes = axes
        self._from_first = from_first
        self._source: Mapping[str, Any] = {}

    def common(self) -> list[tuple[str, str]]:
        """The facts that all ranks' dicts must share: (name, description of its tensors) of parameters in units."""
        outside = {name for named in self.param_map.params if named.unit is None for name in named.names}
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
        by_name = self.param_map.by_name
        out: dict[Key, dict[str, Any]] = {}
        for unit, kind, members in by_handle(self.param_map.params):
            inside = list({id(by_name[n.name]): by_name[n.name] for n in members if n.name in by_name}.values())
            for state, dtype in shaped_states(map(self._planned, inside)):
                having = [each for each in inside if self._planned(each).get(state) == ParamShaped(dtype)]
                shard = self._shard(unit, kind, [named for each in having for named in each.params], state, dtype)
                for each in having:
                    own = each.elements_of(shard)
                    out.setdefault(each.key, {})[state] = each.like_holder(own if own is shard else own.clone())
        for named in self.param_map.params:
            param = by_name.get(named.name)
            if param is None or param.params[0] is not named:
                continue
            for state, value in self._planned(param).items():
                if not isinstance(value, ParamShaped):
                    replicated = isinstance(value, TensorSpec)
                    taken = self._replicated(param, state, value) if replicated else value_of(value)
                    if replicated and self.any_shape and param.handle is not None:
                        taken = taken.as_subclass(KeptWhole)
                    out.setdefault(param.key, {})[state] = taken
        return {
            each.key: {state: out[each.key][state] for state in self._planned(each)}
            for each in self.param_map
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
