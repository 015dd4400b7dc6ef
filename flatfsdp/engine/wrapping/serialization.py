"""Copies and pickles of wrapped models, between steps.

[Note: blueprint] A unit is rebuilt from plain data: its leaves and shards, layouts and settings, and the ranks of its
axes. A copy shares the process groups; a pickle names their ranks and finds or makes groups over them when it is
loaded, with the same world and on the same rank. Prefetch lists are included as far as the units that they name are
included. Users' hooks are copied with their state, and not pickled.
"""

from __future__ import annotations

import copy
import copyreg
import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn

from ...api import BackwardPrefetch
from ...errors import UsageError, few
from ..agreement.once_per_job import warn_once_per_job
from ..base.fqns import fqn
from ..comm.axes import ProcessGroups
from ..comm.process_groups import plan_over
from ..config.unit_options import PrefetchTargets, UnitOptions
from ..device.memory import MemoryTracker
from ..flat.extensions import TransformedParam, as_transform
from ..flat.flat_param import FlatParamHandle
from ..flat.param_guard import ORIGINAL
from ..flat.param_refs import ParamRef, marks_of
from ..flat.states import IDLE
from ..flat.views import SHOWS_NOTHING, SHOWS_SHARD
from ..runtime.entries import Entries
from ..runtime.model import Model, model_of
from ..runtime.module_tree import ignore, ignored_in, put_at_rest, units_in, units_inside
from ..runtime.param_registry import owners_of
from ..runtime.resources import ModelSettings
from ..runtime.rest import quiesce, residuals_of
from ..runtime.unit import Unit
from ..runtime.unit_state import BuiltWith
from .build import install_extensions, new_model
from .wrapper_support import keep_model

BUILT = ("traits", "mixed_precision", "cpu_offload", "island", "modules")
OPTIONS = ("schedule", "state_dict", "backward_prefetch", "forward_prefetch", "names_prefetch")
HANDLE_SETTINGS = ("layout", "rank", "device", "options")

T = TypeVar("T")
# For each unit, the places of the units that it names: those that it prefetches, in forward and in backward, and those
# that come right after its branch.
_NAMING = ("forward_targets", "backward_targets", "branch_before")
Lists = list[list[list[int]]]

# While an outer wrapper is pickled, nested ones are written in place, so that ties across them survive.
_inside = False


def state_of(wrapper: nn.Module) -> dict[str, Any]:
    """The state that `restore` needs to rebuild `wrapper`."""
    unit: Unit = wrapper.__dict__["_unit"]
    attributes = {key: value for key, value in wrapper.__dict__.items() if key not in ("_unit", "_kept_root")}
    return {
        "attributes": attributes,
        "unit": {
            "handles": [
                # torch's copies of parameters lose their attributes, and its pickles their classes.
                {"leaves": handle.leaves, "kinds": [*map(_kind_of, handle.leaves)], **handle_plan(handle)}
                for handle in unit.handles
            ],
            "residuals": [residuals.held for residuals in residuals_of(unit)],
            "homes": [(each.module, each.attribute, each.path, each.leaf) for each in unit.param_refs],
            "aliases": [(each.module, each.attribute, each.path, each.leaf) for each in unit.shared_refs],
            "extended": [(e.leaf, e.state, e.transform) for views in unit.views for e in views.extended],
            "left_alone": ignored_in(unit.entries.first),
            "groups": unit.groups,
            "root": settings_of(unit),
            "is_last_backward": model_of(unit).backwards.is_last_backward,
            **{name: getattr(unit.built, name) for name in BUILT},
            **{name: getattr(unit.options, name) for name in OPTIONS},
        },
    }


def restore(wrapper: nn.Module, state: dict[str, Any]) -> None:
    """Rebuild in `wrapper`, a blank instance, the wrapper that `state` describes."""
    wrapper.__dict__.update(state["attributes"])
    plan = state["unit"]
    tracker = MemoryTracker()
    handles = []
    for entry in plan["handles"]:
        settings = {name: entry[name] for name in HANDLE_SETTINGS}
        for leaf, (kind, marks) in zip(entry["leaves"], entry["kinds"], strict=True):
            leaf.__class__ = kind
            vars(leaf).update(marks)
        handles.append(FlatParamHandle(entry["leaves"], shard=entry["shard"], tracker=tracker, **settings))
        check_rank("model", entry["rank"], plan["groups"])
    unit = Unit(
        Entries([wrapper._modules["_fsdp_wrapped_module"]], in_place=False),  # type: ignore[list-item]
        handles,
        [ParamRef(*each) for each in plan["homes"]],
        built=BuiltWith(
            **{name: plan[name] for name in BUILT},
            counts_gradients=plan["backward_prefetch"] is BackwardPrefetch.BACKWARD_MID,
        ),
        groups=plan["groups"],
        options=UnitOptions(**{name: plan[name] for name in OPTIONS}),
        shared_refs=[ParamRef(*each) for each in plan["aliases"]],
    )
    install_extensions(unit, [transformed(unit, leaf, state, found) for leaf, state, found in plan["extended"]])
    for module, attributes in plan["left_alone"]:
        ignore(module, attributes)
    model = rebuilt_model(unit, plan["root"], tracker, last=plan["is_last_backward"])
    for each in model.units:  # the owners of an inner unit's shared parameters may have come after it
        each.share_params_of(owners_of(each.shared_refs))
    keep_model(wrapper, model)
    put_at_rest(unit)
    for residuals, held in zip(residuals_of(unit), plan["residuals"], strict=True):
        residuals.load(held)


def _kind_of(leaf: nn.Parameter) -> tuple[type, dict[str, Any]]:
    """The class and the attributes of a parameter. [Note: marks of parameters]"""
    return ORIGINAL[type(leaf)], marks_of(leaf)


def handle_plan(handle: FlatParamHandle) -> dict[str, Any]:
    """The data to rebuild a handle from, except its leaves."""
    settings = {name: getattr(handle, name) for name in HANDLE_SETTINGS}
    return {"shard": handle.shard.detach(), **settings}


def settings_of(unit: Unit) -> ModelSettings:
    """The settings of the model of `unit`, with users' later changes."""
    return replace(model_of(unit).setup.settings, limit_all_gathers=unit.resources.limiter.limit)


def check_rank(what: str, rank: int, groups: ProcessGroups) -> None:
    """Refuse an object that was pickled on another `rank` of the shard group."""
    if rank != groups.shard.rank:
        raise UsageError(
            f"this {what} was pickled on rank {rank} of its shard group but is loaded on rank {groups.shard.rank}; "
            "each rank must load its own pickle"
        )


def transformed(unit: Unit, leaf: nn.Parameter, state: Any, transform: Any) -> TransformedParam:
    """The transformed parameter of `leaf` for modules of `unit`."""
    return TransformedParam(
        leaf, state, as_transform(transform), [each for each in unit.param_refs if each.leaf is leaf]
    )


def rebuilt_model(unit: Unit, settings: ModelSettings, tracker: MemoryTracker, *, last: bool) -> Model:
    """A model of `unit`, which was rebuilt. `last`: the value given to `set_is_last_backward`."""
    settings = replace(settings, device=unit.handles[0].device) if unit.handles else settings
    model = new_model(unit, settings, tracker, units_inside(unit))
    model.backwards.is_last_backward = last
    return model


def _check_copyable(unit: Unit) -> None:
    if unit.phase is not IDLE:
        raise UsageError(
            f"a wrapped model can be copied or pickled only between steps; unit {unit.label} is in "
            f"{unit.phase.value}. Copy or pickle it after its forward or backward"
        )


def at_rest(wrapper: nn.Module) -> list[Unit]:
    """The units inside, at rest: users' replacements for parameters have been copied into their shards."""
    units = units_in(wrapper)
    quiesce(units, collective=False, check=_check_copyable)
    for unit in units:
        if any(grads.accumulation.pending for grads in unit.grads):
            raise UsageError(
                "a wrapped model cannot be copied or pickled while gradients accumulate under no_sync(), or without "
                f"all-reduce: those of unit {unit.label} would be lost. First run a backward that reduces them"
            )
    return units


@contextmanager
def _without_flat_params(units: list[Unit]) -> Iterator[None]:
    """Remove flat parameters from modules, whose copies get them from `restore`."""
    flat_refs = [param_ref for unit in units for param_ref in unit.leaves.listing.flat]
    taken = [each for each in flat_refs if each.module._parameters.pop(each.attribute, None) is not None]
    try:
        yield
    finally:
        for param_ref in taken:
            param_ref.register()


def deep_copy(wrapper: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """`copy.deepcopy` of a wrapper: parameters, buffers and settings are copied, process groups shared."""
    units = at_rest(wrapper)
    twin: nn.Module = type(wrapper).__new__(type(wrapper))
    memo[id(wrapper)] = twin
    with _without_flat_params(units):
        state = copy.deepcopy(state_of(wrapper), memo)
    restore(twin, state)
    unit, copied = wrapper.__dict__["_unit"], twin.__dict__["_unit"]
    for old, new in zip(unit.handles, copied.handles, strict=True):
        memo[id(old.flat_param)] = new.flat_param  # an optimizer copied with the model refers to it
    memo.update({id(group): group for group in unit.groups.process_groups})
    copied.built = replace(copied.built, device_mesh=unit.built.device_mesh)
    model_of(copied).setup.set_options(
        copied,
        comm_hook=copied_hook(unit.options.comm_hook, memo, "register_comm_hook()"),
        all_reduce_hook=copied_hook(unit.options.all_reduce_hook, memo, "set_all_reduce_hook()"),
    )
    set_lists(units_in(twin), lists_of(units))
    return twin


def copied_hook(hook: T | None, memo: dict[int, Any], method: str) -> T | None:
    """A copy of a user-defined hook, whose process groups are in `memo`; None if it cannot be copied."""
    if id(hook) in memo:  # None if a copy has failed before
        return memo[id(hook)]
    try:
        return copy.deepcopy(hook, memo)
    except Exception as error:  # any error of user-defined state
        warn_once_per_job(
            f"the copy of a wrapped model does not have the value that was passed to {method}, which cannot be copied "
            f"({type(error).__name__}: {error}). Call {method} on the copy before it trains"
        )
        memo[id(hook)] = None
        return None


def lists_of(units: list[Unit]) -> Lists:
    """The lists of units that `units` name, by their places among these."""
    places = {unit: place for place, unit in enumerate(units)}

    def known(targets: PrefetchTargets[Unit]) -> list[int]:
        return [places[unit] for unit in targets.units() if unit in places]

    return [[known(getattr(unit.options, name)) for name in _NAMING] for unit in units]


def set_lists(units: list[Unit], lists: Lists) -> None:
    """Let `units` name each other as in `lists`."""
    for unit, named in zip(units, lists, strict=True):
        if any(named):
            targets = (PrefetchTargets(units[place] for place in each) for each in named)
            model_of(unit).setup.set_options(unit, **dict(zip(_NAMING, targets, strict=True)))


def reduce(wrapper: nn.Module) -> tuple[Any, ...]:
    """The value of `__reduce_ex__` for `wrapper`: every shard once, and no view of it."""
    global _inside
    if _inside:
        return _blank, (type(wrapper),), state_of(wrapper)
    units = at_rest(wrapper)
    if any(unit.options.comm_hook is not None or unit.options.all_reduce_hook is not None for unit in units):
        warn_once_per_job(
            "the pickle of a wrapped model does not contain its communication and all-reduce hooks. Register them "
            "again after loading it, before it trains"
        )
    refuse_parts(units)
    buffer = io.BytesIO()
    for unit in units:
        for views in unit.views:
            views.show(SHOWS_NOTHING)
    _inside = True
    try:
        with _without_flat_params(units):
            torch.save((type(wrapper), state_of(wrapper), lists_of(units)), buffer)
    finally:
        _inside = False
        for unit in units:
            for views in unit.views:
                views.show(SHOWS_SHARD)
    return _load, (buffer.getvalue(),)


def refuse_parts(units: list[Unit]) -> None:
    """Refuse to pickle parameters that tensor parallelism has split, or that lie on a mesh of their own otherwise."""
    extended = ((unit, each) for unit in units for views in unit.views for each in views.extended)
    held = [(unit, each.param_refs[0]) for unit, each in extended if not each.transform.can_be_pickled(each.state)]
    if parts := [fqn(unit.place.name, param_ref.path) for unit, param_ref in held]:
        raise UsageError(
            f"a sharded model with DTensors ({few(parts)}) cannot be pickled: they are on a mesh of this job, and "
            "torch's tensor parallelism registers hooks on modules that cannot be pickled. Save its state_dict() "
            "instead"
        )


def _blank(cls: type[nn.Module]) -> nn.Module:
    return cls.__new__(cls)


def _load(data: bytes) -> nn.Module:
    cls, state, lists = torch.load(io.BytesIO(data), weights_only=False)
    wrapper = _blank(cls)
    restore(wrapper, state)
    set_lists(units_in(wrapper), lists)
    return wrapper


def _reduce_groups(groups: ProcessGroups) -> tuple[Any, ...]:
    return plan_over, (groups.strategy, groups.given_ranks, groups.device)


copyreg.pickle(ProcessGroups, _reduce_groups)
