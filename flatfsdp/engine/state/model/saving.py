"""`state_dict()` of wrapped modules: full values, each rank's intervals, or flat shards.

[Note: state dicts] Modules make their state dict themselves, while placeholders stand for the parameters of their unit.
Then each unit replaces its placeholders by values, one unit after the other. If a module reads values in the process (a
hook that casts, parameters of a special class), its unit is unsharded for it, and nested ones are still handled one by
one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import nn

from ....errors import UsageError
from ...agreement.object_collectives import is_first_of
from ...base.fqns import clean
from ...config.state_dict_configs import StateDictSettings, StateDictType
from ...flat.flat_param import FlatParamHandle
from ...flat.guard import ORIGINAL
from ...flat.param_refs import flat_name
from ...flat.states import SUMMONED
from ...layout.layout import ParamSpec
from ...models.rest import check_idle, collective_call, quiesce, take_over
from ...models.walks import units_in
from ...runtime.unit import Unit
from ..consolidate import consolidated, is_first
from ..from_rank0 import shares_buffers, take_buffers
from ..full_params import summon
from ..named_param import NamedParam, by_handle, interval_of, params_of
from ..owned_interval import OwnedInterval, unpadded_span
from ..parts import axes_of_parts
from .distributed_values import carried, carrier_of, flat_of
from .placeholders import Placeholder, PlaceholderReadError, Placeholders, placeholder_for
from .types import StateDictRequest, settings_of, shares_memory


@dataclass
class StateDictCall:
    """One external call, and the calls that follow from it.

    Attributes:
        request: the form of the values.
        is_local: whether parameters that ranks split are returned as flat shards.
        keeps: whether this rank gets the gathered values.
        active: units whose modules make their state dict at the moment, outermost first.
        values: those made so far, by the id of the leaf; they are kept, so that tied names share them.
        made: the values that are not modules' own, by their ids, which stay unique while they are kept.
        copies: of shards, by the id of the handle.
    """

    request: StateDictRequest
    is_local: bool
    keeps: bool
    active: list[Unit] = field(default_factory=list)
    values: dict[int, Any] = field(default_factory=dict)
    made: dict[int, Any] = field(default_factory=dict)
    copies: dict[int, torch.Tensor] = field(default_factory=dict)

    @property
    def communicates(self) -> bool:
        """Whether the call communicates."""
        return self.request.carrier != "interval"

    def takes_shards(self, unit: Unit) -> bool:
        """Whether the parameters of `unit` are returned as flat shards."""
        return self.is_local and carrier_of(unit, self.request.carrier) != "whole"

    @property
    def broadcasts_buffers(self) -> bool:
        """Whether every rank gets the first one's buffers. [Note: buffers of ranks]"""
        return self.request.carrier == "whole" and not self.request.rank0_only


_job: ContextVar[StateDictCall | None] = ContextVar("state dict under way", default=None)


def state_dict(wrapper: nn.Module, destination: Any, prefix: str, *, keep_vars: bool) -> Any:
    """The result of `nn.Module.state_dict` for a wrapper. Collective for full values."""
    unit: Unit = wrapper.__dict__["_unit"]
    if destination is None:
        destination = OrderedDict()
        destination._metadata = OrderedDict()
    if unit.phase is SUMMONED:
        return unit.entries.first.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
    job = _job.get()
    if job is not None:
        _add(job, wrapper, destination, prefix)
        return destination
    units = units_in(wrapper)
    job = begin(unit, units, settings_of(wrapper))
    start = len(destination)
    token = _job.set(job)
    try:
        shares = job.broadcasts_buffers and shares_buffers(units, wrapper)
        with collective_call(units, "state_dict()", always=shares, when=job.communicates):
            _add(job, wrapper, destination, prefix)
            if shares:
                take_buffers(unit, wrapper, destination, prefix)
    finally:
        _job.reset(token)
    _finish(job, destination, start, keep_vars=keep_vars)
    return destination


def begin(unit: Unit, units: Sequence[Unit], chosen: StateDictSettings) -> StateDictCall:
    """A call for `units`, outermost `unit`, which are brought to rest if they will be gathered."""
    request = StateDictRequest.of(chosen.state_dict_config)
    is_local = chosen.state_dict_type is StateDictType.LOCAL_STATE_DICT
    first = is_first(unit.groups) and is_first_of(axes_of_parts(units))
    job = StateDictCall(request, is_local, keeps=first or not request.rank0_only)
    for each in units:
        if job.takes_shards(each):
            check_flat(each)
    collective = job.communicates
    quiesce(units, collective=collective, shards=collective, check=lambda each: check_idle(each, "state_dict()"))
    if not collective:
        take_over([each for each in units if each.shows_shard])
    return job


def check_flat(unit: Unit) -> None:
    """Refuse to make, or load, flat shards of `unit` if ranks split its parameters by rows or grains.

    Raises:
        UsageError: they do.
    """
    if any(handle.options.layout != "flat" and handle.layout.world > 1 for handle in unit.handles):
        wrapped = 'layout="rows"' if unit.handles[0].options.layout == "rows" else "grains as its layout"
        raise UsageError(
            f"LOCAL_STATE_DICT of unit {unit.label}: it was wrapped with {wrapped}, where a shard has pieces of "
            "parameters and is no part of one flat parameter. Use SHARDED_STATE_DICT, which needs no communication "
            'either and loads into any layout, or FULL_STATE_DICT; or wrap with layout="flat"'
        )


def _add(job: StateDictCall, wrapper: nn.Module, destination: Any, prefix: str) -> None:
    unit: Unit = wrapper.__dict__["_unit"]
    start = len(destination)
    for before in wrapper._state_dict_pre_hooks.values():
        before(wrapper, prefix, True)
    job.active.append(unit)
    try:
        by_values = has_own_classes(unit)
        if not by_values:
            placeholders = Placeholders(unit, receives=False)
            try:
                unit.entries.first.state_dict(destination=destination, prefix=prefix, keep_vars=True)
            except PlaceholderReadError:
                by_values = True
                for key in list(islice(destination, start, None)):
                    del destination[key]
            finally:
                placeholders.remove()
        if by_values:
            _add_values(job, unit, destination, prefix, start)
    finally:
        job.active.pop()
    _rename(destination, prefix, start)
    fill(job, unit, destination, list(islice(destination, start, None)), prefix)
    metadata = getattr(destination, "_metadata", {}).get(prefix[:-1], {})
    for after in wrapper._state_dict_hooks.values():
        if (changed := after(wrapper, destination, prefix, metadata)) is not None:
            raise UsageError(
                f"a state dict hook of the wrapper of {unit.entries.class_name} returned a "
                f"{type(changed).__name__}: change the dictionary in place, and return None"
            )


def has_own_classes(unit: Unit) -> bool:
    """Whether parameters have user-defined classes, on whose attributes modules may depend."""
    return any(ORIGINAL[type(each.original)] is not nn.Parameter for each in params_of([unit])) and unit.shows_shard


def _add_values(job: StateDictCall, unit: Unit, destination: Any, prefix: str, start: int) -> None:
    """Let the modules of `unit` see full parameters."""
    with summon([unit]):
        unit.entries.first.state_dict(destination=destination, prefix=prefix, keep_vars=True)
        params = list(params_of([unit]))
        leaves = {id(each.original): each.handle.leaves[each.index] for each in params}
        memory = {_storage(each.original) for each in params} - {None}
        for key, value in list(islice(destination.items(), start, None)):
            if id(value) in leaves:
                destination[key] = placeholder_for(leaves[id(value)], [unit])
            elif id(value) not in job.made and _storage(value) in memory:  # a view or a part of a parameter
                _put(job, destination, key, job.request.copy(value))


def _storage(value: Any) -> int | None:
    """The address of the storage of `value`, if it is a tensor with memory."""
    if not isinstance(value, torch.Tensor) or isinstance(value, Placeholder | OwnedInterval) or not value.numel():
        return None
    return value.untyped_storage().data_ptr()


def _rename(destination: Any, prefix: str, start: int) -> None:
    """Drop the names of wrappers that do not drop them themselves."""
    keys = list(islice(destination, start, None))
    names = [prefix + clean(key.removeprefix(prefix)) for key in keys]
    if names != keys:
        values = [destination.pop(key) for key in keys]
        destination.update(zip(names, values, strict=True))
    metadata: dict[str, Any] = getattr(destination, "_metadata", {})
    for key in list(metadata):
        if key.startswith(prefix) and (name := prefix + clean(key.removeprefix(prefix))) != key:
            metadata[name] = metadata.pop(key)


def fill(job: StateDictCall, unit: Unit, destination: Any, among: Sequence[str], prefix: str) -> None:
    """Replace placeholders `among` these keys by values: for parameters of `unit`, and of owning units that make no
    state dict of their own in this call."""
    waiting: dict[int, list[str]] = {}
    for key in among:
        if type(value := destination[key]) is Placeholder:
            waiting.setdefault(id(value.leaf), []).append(key)
    for owning_unit in (unit, *(each for each in unit.owning_units if each not in job.active)):
        params = [each for each in params_of([owning_unit]) if id(each.leaf) in waiting]
        if job.takes_shards(owning_unit):
            for key in (key for each in params for key in waiting[id(each.leaf)]):
                del destination[key]
            for kind, handle in enumerate(unit.handles) if owning_unit is unit else ():
                name = prefix + flat_name(kind)
                _put(job, destination, name, _flat(job, name, unit, handle))
            continue
        for _, kind, members in by_handle(params):
            missing = [each for each in members if id(each.leaf) not in job.values]
            if missing:
                named = [replace(each, name=waiting[id(each.leaf)][0]) for each in missing]
                job.values.update(_values(job, owning_unit, kind, named))
            for each in members:
                for key in waiting[id(each.leaf)]:
                    _put(job, destination, key, job.values[id(each.leaf)])


def _put(job: StateDictCall, destination: Any, key: str, value: Any) -> None:
    destination[key] = value
    job.made[id(value)] = value


def _values(job: StateDictCall, unit: Unit, kind: int, params: Sequence[NamedParam]) -> Iterator[tuple[int, Any]]:
    """(id of the leaf, value) of some parameters of one handle. Collective over the shard axis if the job
    communicates."""
    if not job.communicates:
        for each in params:
            yield id(each.leaf), each.interval(each.local_view(_shard_of(job, each.handle)))
        return
    with consolidated(unit, kind) as unsharded:
        for each in params:
            view = unsharded[each.index]
            yield id(each.leaf), carried(view, unit, kind, each.index, job.request, keeps=job.keeps)


def _shard_of(job: StateDictCall, handle: FlatParamHandle) -> torch.Tensor:
    if shares_memory():
        return handle.shard.detach()
    if id(handle) not in job.copies:
        job.copies[id(handle)] = job.request.copy(handle.shard)
    return job.copies[id(handle)]


def _flat(job: StateDictCall, name: str, unit: Unit, handle: FlatParamHandle) -> Any:
    """The flat shard without world padding. Collective if it becomes a ShardedTensor."""
    layout = handle.layout
    span = unpadded_span(layout, handle.rank)
    local = _shard_of(job, handle)[: span.numel]
    if job.communicates:
        return flat_of(local, span.start, layout.numel, unit.axes.of(handle).shard)
    # The name identifies the layout.
    spec = ParamSpec(f"{name} of layout {layout.digest()}", (layout.numel,))
    made = interval_of(unit.axes.of(handle), local, spec, partial(unpadded_span, layout))
    made.is_local = any(each.part is not None for each in layout.params)
    return made


def _finish(job: StateDictCall, destination: Any, start: int, *, keep_vars: bool) -> None:
    offload = job.request.offload_to_cpu and not shares_memory()
    for key, value in list(islice(destination.items(), start, None)):
        if not job.keeps:
            del destination[key]
        elif isinstance(value, torch.Tensor) and id(value) not in job.made:
            value = value if keep_vars else value.detach()
            destination[key] = value.detach().to("cpu", copy=True) if offload else value
