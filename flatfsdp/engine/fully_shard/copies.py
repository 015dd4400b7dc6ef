"""Copies and pickles of modules of `fully_shard`, between steps.

[Note: plans of units] A module's own attributes are copied or pickled as those of any module, without its unit and
without the parameters that the unit shows. They are accompanied by a *plan* for each unit, plain data that names
modules and pieces of shards. When all modules exist, units are rebuilt from the plans ([Note: blueprint] is the
wrapper's). Copies communicate over the same mesh; a pickle contains its ranks.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import nn

from ...errors import UsageError
from ..agreement.once_per_job import warn_once_per_job
from ..comm.axes import ProcessGroups
from ..comm.process_groups import mesh_over
from ..config.unit_options import UnitOptions
from ..device.memory import MemoryTracker
from ..features.forward_methods import REGISTERED, register_fsdp_forward_method
from ..flat.extended_handle import handle_class
from ..flat.extensions import Transform
from ..flat.flat_param import FlatParamOptions
from ..flat.param_guard import ORIGINAL
from ..flat.param_refs import ParamRef, marks_of
from ..runtime.entries import Entries, WeakModules, plain_class
from ..runtime.model import model_of
from ..runtime.module_tree import ignore, ignored_in, put_at_rest
from ..runtime.resources import ModelSettings
from ..runtime.unit import Unit
from ..runtime.unit_state import BuiltWith
from ..wrapping import serialization
from ..wrapping.build import install_extensions
from ..wrapping.wrapper_support import keep_model
from .class_swap import blank, swap_class

_OF_UNIT = ("_unit", "_kept_root")
# The fields of `BuiltWith` in pickles, except modules and the mesh.
_BUILT = tuple(each.name for each in fields(BuiltWith) if each.name not in ("modules", "device_mesh"))

# Units whose modules are being copied or pickled: nested modules leave theirs to the outermost one.
_under_way: list[Unit] = []


@dataclass(frozen=True)
class UnitPlan:
    """The data from which a unit is rebuilt. [Note: plans of units]

    Attributes:
        entries, modules: the modules that hold it, and all of its modules.
        handles: settings and options of each; leaves: for each handle, whether each leaf requires a gradient, and its
            class and attributes.
        homes: (module, attribute, path, number of the handle, number of the leaf) of each reference.
        extended: (number of the handle, number of the leaf, state, transform) of each parameter that modules see
            transformed.
        left_alone: the ignored parameters.
        shared: (module, attribute, path, owner, number of the handle, number of the leaf) of each reference to a
            parameter that another unit owns, by its place among the copied units. [Note: late ties]
        elsewhere: the axes of handles that are sharded over others, by their numbers. [Note: several meshes]
    """

    entries: list[nn.Module]
    modules: list[nn.Module]
    handles: list[dict[str, Any]]
    leaves: list[list[tuple[bool, type, dict[str, Any]]]]
    homes: list[tuple[nn.Module, str, str, int, int]]
    shared: list[tuple[nn.Module, str, str, int, int, int]]
    extended: list[tuple[int, int, Any, Transform]]
    left_alone: list[tuple[nn.Module, frozenset[str] | None]]
    groups: ProcessGroups
    elsewhere: dict[int, ProcessGroups]
    mesh: Any
    settings: ModelSettings
    is_last_backward: bool
    built: dict[str, Any]
    options: dict[str, Any]


def _plans(units: list[Unit]) -> list[UnitPlan]:
    """The plans of `units`, which must include owners of tied parameters.

    Raises:
        UsageError: one is not.
    """
    for unit in units:
        if lacking := [owner for owner in unit.owning_units if owner not in units]:
            raise UsageError(
                f"unit {unit.label} holds parameters of unit {lacking[0].label}, which is not inside the module that "
                "is copied or pickled. Copy a module that contains both"
            )
    owned = {
        id(leaf): (number, kind, index)
        for number, unit in enumerate(units)
        for kind, handle in enumerate(unit.handles)
        for index, leaf in enumerate(handle.leaves)
    }
    return [_plan(unit, owned) for unit in units]


def _plan(unit: Unit, owned: Mapping[int, tuple[int, int, int]]) -> UnitPlan:
    places = {}
    for number, handle in enumerate(unit.handles):
        if not handle.face.holds_leaves:
            handle.face.follow_requires_grad()
        places.update({id(leaf): (number, index) for index, leaf in enumerate(handle.leaves)})
    return UnitPlan(
        entries=list(unit.entries),
        modules=list(unit.built.modules),
        handles=[*map(serialization.handle_plan, unit.handles)],
        leaves=[
            [(leaf.requires_grad, ORIGINAL[type(leaf)], marks_of(leaf)) for leaf in handle.leaves]
            for handle in unit.handles
        ],
        homes=[(ref.module, ref.attribute, ref.path, *places[id(ref.leaf)]) for ref in unit.param_refs],
        shared=[(ref.module, ref.attribute, ref.path, *owned[id(ref.leaf)]) for ref in unit.shared_refs],
        extended=[(*places[id(each.leaf)], each.state, each.transform) for v in unit.views for each in v.extended],
        left_alone=[each for entry in unit.entries for each in ignored_in(entry)],
        groups=unit.groups,
        elsewhere={
            n: unit.axes.elsewhere[handle] for n, handle in enumerate(unit.handles) if handle in unit.axes.elsewhere
        },
        mesh=unit.built.device_mesh,
        settings=serialization.settings_of(unit),
        is_last_backward=model_of(unit).backwards.is_last_backward,
        built={name: getattr(unit.built, name) for name in _BUILT},
        options={name: getattr(unit.options, name) for name in serialization.OPTIONS},
    )


def _build(plan: UnitPlan, shards: Sequence[torch.Tensor]) -> Unit:
    """A unit rebuilt from `plan`, in the modules that it names, with the memory of `shards`."""
    tracker, handles = MemoryTracker(), []
    for settings, leaves, shard in zip(plan.handles, plan.leaves, shards, strict=True):
        made = []
        for requires_grad, kind, attributes in leaves:
            leaf = nn.Parameter(torch.empty(0, dtype=shard.dtype, device=settings["device"]), requires_grad)
            leaf.__class__ = kind
            vars(leaf).update(attributes)
            made.append(leaf)
        kind = handle_class(settings["options"])
        handles.append(kind(made, tracker=tracker, **{**settings, "shard": shard}))
    unit = Unit(
        Entries(plan.entries, in_place=True),
        handles,
        [
            ParamRef(module, attribute, path, handles[number].leaves[index])
            for module, attribute, path, number, index in plan.homes
        ],
        built=BuiltWith(**plan.built, modules=WeakModules(plan.modules), device_mesh=plan.mesh),
        groups=plan.groups,
        elsewhere={handles[number]: groups for number, groups in plan.elsewhere.items()},
        options=UnitOptions(**plan.options),
    )
    extended = [(handles[number].leaves[index], *how) for number, index, *how in plan.extended]
    install_extensions(unit, [serialization.transformed(unit, *each) for each in extended])
    put_at_rest(unit)
    for module, ignored in plan.left_alone:
        ignore(module, ignored)
    model = serialization.rebuilt_model(unit, plan.settings, tracker, last=plan.is_last_backward)
    for entry in plan.entries:
        entry.__dict__["_unit"] = unit
        for name in entry.__dict__.pop(REGISTERED, ()):
            register_fsdp_forward_method(entry, name)
    keep_model(plan.entries[0], model)
    return unit


def _share(units: Sequence[Unit], plans: Sequence[UnitPlan]) -> None:
    """Let `units`, built as `plans` describe, hold parameters of each other."""
    for unit, plan in zip(units, plans, strict=True):
        owners = [units[number] for *_, number, _, _ in plan.shared]
        for (module, attribute, path, _, kind, index), owner in zip(plan.shared, owners, strict=True):
            unit.shared_refs.append(ParamRef(module, attribute, path, owner.handles[kind].leaves[index]))
            owner.handles[kind].face.put(unit.shared_refs[-1])
        unit.share_params_of(list(dict.fromkeys(owners)))


@contextmanager
def _taking(units: list[Unit]) -> Iterator[None]:
    _under_way.extend(units)
    try:
        yield
    finally:
        del _under_way[len(_under_way) - len(units) :]


def _attributes(module: nn.Module) -> dict[str, Any]:
    """The attributes of `module`, without its unit, its methods that gather, and parameters that units show."""
    left_out = (*_OF_UNIT, *module.__dict__.get(REGISTERED, ()))
    return {key: value for key, value in module.__dict__.items() if key not in left_out}


@contextmanager
def _without_parameters(units: list[Unit]) -> Iterator[None]:
    """Set the entries of parameters that `units` show to None, which keeps their places."""
    refs = [ref for unit in units for ref in (*unit.param_refs, *unit.shared_refs)]
    held = [(ref.module._parameters, ref.attribute) for ref in refs]
    before = [registry[attribute] for registry, attribute in held]
    for registry, attribute in held:
        registry[attribute] = None
    try:
        yield
    finally:
        for (registry, attribute), parameter in zip(held, before, strict=True):
            registry[attribute] = parameter


# -- copies ------------------------------------------------------------------------------------------------------------


def deep_copy(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """`copy.deepcopy` of a module: parameters, buffers and settings are copied, process groups shared."""
    if module.__dict__["_unit"] in _under_way:
        return _copy_attributes(module, memo)
    units = serialization.at_rest(module)
    with _taking(units):
        for unit in units:
            groups = {group for each in unit.axes.all for group in each.process_groups}
            meshes = [handle.options.face.mesh for handle in unit.handles]  # type: ignore[attr-defined]
            for shared in (*groups, *meshes, unit.built.device_mesh):
                memo[id(shared)] = shared
        with _without_parameters(units):
            twin = _copy_attributes(module, memo)
            plans = copy.deepcopy(_plans(units), memo)
        twins = [_build(plan, [each["shard"] for each in plan.handles]) for plan in plans]
        _share(twins, plans)
    for unit, made in zip(units, twins, strict=True):
        for old, new in zip(unit.handles, made.handles, strict=True):
            holders = zip(old.face.holders, new.face.holders, strict=True)
            memo.update({id(one): two for one, two in holders})  # an optimizer copied with the model refers to it
        hook = serialization.copied_hook(unit.options.all_reduce_hook, memo, "set_all_reduce_hook()")
        model_of(made).setup.set_options(made, all_reduce_hook=hook)
    serialization.set_lists(twins, serialization.lists_of(units))
    return twin


def _copy_attributes(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    twin = blank(type(module))
    memo[id(module)] = twin
    twin.__dict__.update(copy.deepcopy(_attributes(module), memo))
    return twin


# -- pickles -----------------------------------------------------------------------------------------------------------


def reduce(module: nn.Module, front: type) -> tuple[Any, ...]:
    """The value of `__reduce_ex__` for `module`, whose class derives from `front`: every shard once."""
    if module.__dict__["_unit"] in _under_way:
        return _blank, (front, plain_class(module)), _attributes(module)
    units = serialization.at_rest(module)
    serialization.refuse_parts(units)
    if any(unit.options.all_reduce_hook is not None for unit in units):
        warn_once_per_job(
            "the pickle of a module of fully_shard() does not have its all-reduce hooks. Register them again after "
            "loading, before training"
        )
    buffer = io.BytesIO()
    with _taking(units), _without_parameters(units):
        plans = [_pickled(plan) for plan in _plans(units)]
        torch.save((module, plans, serialization.lists_of(units)), buffer)
    return _load, (buffer.getvalue(),)


def _pickled(plan: UnitPlan) -> UnitPlan:
    options = [each["options"] for each in plan.handles]
    described = [_on(each, _described(each.face.mesh)) for each in options]
    handles = [{**each, "options": one} for each, one in zip(plan.handles, described, strict=True)]
    return replace(plan, mesh=_described(plan.mesh), handles=handles)


def _described(mesh: Any) -> Any:
    return mesh.device_type, mesh.mesh.tolist(), mesh.mesh_dim_names


def _on(options: FlatParamOptions, mesh: Any) -> FlatParamOptions:
    return replace(options, face=replace(options.face, mesh=mesh))  # type: ignore[type-var]


def _blank(front: type, plain: type[nn.Module]) -> nn.Module:
    made = plain.__new__(plain)
    swap_class(made, front)
    return made


def _load(data: bytes) -> nn.Module:
    module, plans, lists = torch.load(io.BytesIO(data), weights_only=False)
    meshes: dict[str, Any] = {}

    def mesh_of(groups: ProcessGroups, described: Any) -> Any:
        key = str((described, groups.given_ranks))
        if key not in meshes:
            meshes[key] = mesh_over(groups, *described)
        return meshes[key]

    units = []
    for plan in plans:
        for number, settings in enumerate(plan.handles):
            groups = plan.elsewhere.get(number, plan.groups)
            serialization.check_rank("module", settings["rank"], groups)
            settings["options"] = _on(settings["options"], mesh_of(groups, settings["options"].face.mesh))
        mesh = mesh_of(plan.groups, plan.mesh)
        units.append(_build(replace(plan, mesh=mesh), [each["shard"] for each in plan.handles]))
    _share(units, plans)
    serialization.set_lists(units, lists)
    loaded: nn.Module = module
    return loaded
