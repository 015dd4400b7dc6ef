"""Copies and pickles of sharded models of both fronts, between steps.

[Note: plans of units] A module's own attributes are copied or pickled as those of any module, without its unit. They
are accompanied by a *plan* for each unit, plain data that names modules and pieces of shards. When all modules exist,
units are rebuilt from the plans. Copies communicate over the same groups and mesh; a pickle names their ranks, and
finds or makes groups over them when it is loaded, with the same world and on the same rank. Prefetch lists are included
as far as the units that they name are included. Users' hooks are copied with their state, and not pickled.
"""

from __future__ import annotations

import copy
import copyreg
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
from torch import nn

from ...errors import UsageError, few
from ..agreement.once_per_job import warn_once_per_job
from ..agreement.process_groups import given_ranks, groups_of, mesh_over, plan_over
from ..base.fqns import WRAPPED, fqn
from ..comm.axes import ProcessGroups
from ..config.unit_options import PrefetchTargets, UnitOptions
from ..cpu.huge_pages import tracker_for
from ..dtensor.extended_handle import handle_class
from ..features.deferred_gradients import defers, set_defers
from ..features.error_feedback import residuals_of
from ..features.forward_methods import REGISTERED, register_fsdp_forward_method
from ..flat.guard import ORIGINAL
from ..flat.param_refs import ParamRef
from ..flat.states import IDLE
from ..guards.param_guard import GUARDED
from ..models.rest import quiesce
from ..models.walks import ignore, ignored_in, units_in, units_inside
from ..runtime.entries import PLAIN_CLASS, Entries, WeakModules
from ..runtime.model import model_of
from ..runtime.module_tree import put_at_rest
from ..runtime.resources import ModelSettings
from ..runtime.unit import Unit
from ..runtime.unit_state import BuiltWith
from ..transforms.extensions import Transform, TransformedParam, as_transform, marks_of, transformed_in
from .build import install_extensions, new_model
from .wrapper_support import keep_model

OF_UNIT = ("_unit", "_kept_root")
# The fields of `BuiltWith` in plans.
_BUILT = tuple(each.name for each in fields(BuiltWith) if each.name not in ("modules", "device_mesh"))
_OPTIONS = ("schedule", "state_dict", "backward_prefetch", "forward_prefetch", "names_prefetch")
_OF_HANDLE = ("layout", "rank", "device", "options")
_HOOKS = {"comm_hook": "register_comm_hook()", "all_reduce_hook": "set_all_reduce_hook()"}

T = TypeVar("T")
# For each unit, the numbers of the units that it names: those that it prefetches, in forward and in backward, and those
# that come right after its branch.
_NAMING = ("forward_targets", "backward_targets", "branch_before")
Lists = list[list[list[int]]]

# Units whose modules are being copied or pickled: nested modules leave theirs to the outermost one.
_under_way: list[Unit] = []


@dataclass(frozen=True)
class UnitPlan:
    """The data from which a unit is rebuilt. [Note: plans of units]

    Attributes:
        entries: the modules that hold it: those of `fully_shard`, or the wrapper; modules: all of its modules.
        handles: settings and options of each; leaves: for each handle, each leaf, and its class and attributes, which
            torch's copies and pickles lose. If modules hold other parameters at rest: whether it requires a gradient.
        homes: (module, attribute, path, number of the handle, number of the leaf) of each reference.
        extended: (number of the handle, number of the leaf, state, transform) of each parameter that modules see
            transformed.
        left_alone: the ignored parameters.
        shared: (module, attribute, path, owner, number of the handle, number of the leaf) of each reference to a
            parameter that another unit owns, by its number among the copied units. [Note: late ties]
        elsewhere: the axes of handles that are sharded over others, by their numbers. [Note: several meshes]
        in_place: whether the entries are modules of `fully_shard`.
        residuals: of gradients, for each kind with error feedback.
    """

    entries: list[nn.Module]
    modules: list[nn.Module]
    handles: list[dict[str, Any]]
    leaves: list[list[tuple[nn.Parameter | bool, type, dict[str, Any]]]]
    homes: list[tuple[nn.Module, str, str, int, int]]
    shared: list[tuple[nn.Module, str, str, int, int, int]]
    extended: list[tuple[int, int, Any, Transform]]
    left_alone: list[tuple[nn.Module, frozenset[str] | None]]
    groups: ProcessGroups
    elsewhere: dict[int, ProcessGroups]
    mesh: Any
    settings: ModelSettings
    defers: bool
    built: dict[str, Any]
    options: dict[str, Any]
    in_place: bool = True
    residuals: Sequence[Mapping[str, torch.Tensor]] = ()


def plans_of(module: nn.Module, units: list[Unit]) -> list[UnitPlan]:
    """The plans of `units`, those inside `module`, which must include owners of tied parameters.

    Raises:
        UsageError: one is not.
    """
    wrappers: dict[Unit, list[nn.Module]] = {}
    for each in module.modules():
        if isinstance(unit := each.__dict__.get("_unit"), Unit):
            wrappers.setdefault(unit, []).append(each)
    owned = {}
    for number, unit in enumerate(units):
        if lacking := [owner for owner in unit.owning_units if owner not in units]:
            raise UsageError(
                f"unit {unit.label} holds parameters of unit {lacking[0].label}, which is not inside the module that "
                "is copied or pickled. Copy a module that contains both"
            )
        for kind, handle in enumerate(unit.handles):
            owned.update({id(leaf): (number, kind, index) for index, leaf in enumerate(handle.leaves)})
    return [_plan(unit, [*unit.entries] if unit.entries.in_place else wrappers[unit], owned) for unit in units]


def _plan(unit: Unit, entries: list[nn.Module], owned: Mapping[int, tuple[int, int, int]]) -> UnitPlan:
    in_place = unit.entries.in_place
    for handle in unit.handles:
        handle.face.follow_requires_grad()
    elsewhere = unit.axes.elsewhere
    return UnitPlan(
        entries=entries,
        modules=list(unit.built.modules),
        handles=[
            {"shard": handle.shard.detach(), **{name: getattr(handle, name) for name in _OF_HANDLE}}
            for handle in unit.handles
        ],
        leaves=[
            [(each.requires_grad if in_place else each, ORIGINAL[type(each)], marks_of(each)) for each in originals]
            for originals in [handle.face.originals for handle in unit.handles]
        ],
        homes=[(ref.module, ref.attribute, ref.path, *owned[id(ref.leaf)][1:]) for ref in unit.param_refs],
        shared=[(ref.module, ref.attribute, ref.path, *owned[id(ref.leaf)]) for ref in unit.shared_refs],
        extended=[
            (*owned[id(each.leaf)][1:], each.state, each.transform)
            for views in unit.views
            for each in transformed_in(views)
        ],
        left_alone=[each for entry in unit.entries for each in ignored_in(entry)],
        groups=unit.groups,
        elsewhere={n: elsewhere[handle] for n, handle in enumerate(unit.handles) if handle in elsewhere},
        mesh=unit.built.device_mesh,
        # With users' later changes.
        settings=replace(model_of(unit).setup.settings, limit_all_gathers=unit.resources.limiter.limit),
        defers=defers(model_of(unit)),
        built={name: getattr(unit.built, name) for name in _BUILT},
        options={name: getattr(unit.options, name) for name in _OPTIONS},
        in_place=in_place,
        residuals=[residuals.held for residuals in residuals_of(unit)],
    )


def build_units(plans: Sequence[UnitPlan], lists: Lists) -> list[Unit]:
    """The units of `plans`, rebuilt in the modules that these name."""
    units = [_unit_of(plan) for plan in plans]
    for unit, plan in zip(units, plans, strict=True):
        owners = [units[number] for *_, number, _, _ in plan.shared]
        for (module, attribute, path, _, kind, index), owner in zip(plan.shared, owners, strict=True):
            unit.shared_refs.append(ParamRef(module, attribute, path, owner.handles[kind].leaves[index]))
            owner.handles[kind].face.put(unit.shared_refs[-1])
        unit.share_params_of(list(dict.fromkeys(owners)))
    for unit, named in zip(units, lists, strict=True):
        if any(named):
            targets = (PrefetchTargets(units[number] for number in each) for each in named)
            model_of(unit).setup.set_options(unit, **dict(zip(_NAMING, targets, strict=True)))
    return units


def _unit_of(plan: UnitPlan) -> Unit:
    tracker, handles = tracker_for(plan.settings.device), []
    for settings, leaves in zip(plan.handles, plan.leaves, strict=True):
        made = []
        for leaf, cls, attributes in leaves:
            if not isinstance(leaf, nn.Parameter):
                empty = torch.empty(0, dtype=settings["shard"].dtype, device=settings["device"])
                leaf = nn.Parameter(empty, requires_grad=leaf)
            leaf.__class__ = cls
            vars(leaf).update(attributes)
            made.append(leaf)
        handles.append(handle_class(settings["options"])(made, tracker=tracker, **settings))
    entries = plan.entries if plan.in_place else [each._modules[WRAPPED] for each in plan.entries]
    unit = Unit(
        Entries(entries, in_place=plan.in_place),  # type: ignore[arg-type]
        handles,
        [
            ParamRef(module, attribute, path, handles[number].leaves[index])
            for module, attribute, path, number, index in plan.homes
        ],
        built=BuiltWith(
            **plan.built,
            modules=WeakModules(plan.modules) if plan.in_place else plan.modules,
            device_mesh=plan.mesh,
        ),
        groups=plan.groups,
        elsewhere={handles[number]: groups for number, groups in plan.elsewhere.items()},
        options=UnitOptions(**plan.options),
        guard=GUARDED,
    )
    extended = []
    for number, index, state, transform in plan.extended:
        leaf = handles[number].leaves[index]
        refs = [each for each in unit.param_refs if each.leaf is leaf]
        extended.append(TransformedParam(leaf, state, as_transform(transform), refs))
    install_extensions(unit, extended)
    put_at_rest(unit)
    for module, ignored in plan.left_alone:
        ignore(module, ignored)
    chosen = replace(plan.settings, device=handles[0].device) if handles else plan.settings
    model = new_model(unit, chosen, tracker, units_inside(unit))
    set_defers(model, later=plan.defers)
    for entry in plan.entries:
        entry.__dict__["_unit"] = unit
        for name in entry.__dict__.pop(REGISTERED, ()):
            register_fsdp_forward_method(entry, name)
    keep_model(plan.entries[0], model)
    for residuals, held in zip(residuals_of(unit), plan.residuals, strict=False):
        residuals.load(held)
    return unit


def units_at_rest(module: nn.Module) -> list[Unit]:
    """The units inside, at rest: users' replacements for parameters have been copied into their shards."""
    units = units_in(module)
    quiesce(units, collective=False, check=_check_copyable)
    for unit in units:
        if any(grads.accumulation.pending for grads in unit.grads):
            raise UsageError(
                "a sharded model cannot be copied or pickled while gradients accumulate under no_sync(), or without "
                f"all-reduce: those of unit {unit.label} would be lost. First run a backward that reduces them"
            )
    return units


def _check_copyable(unit: Unit) -> None:
    if unit.phase is not IDLE:
        raise UsageError(
            f"a sharded model can be copied or pickled only between steps; unit {unit.label} is in "
            f"{unit.phase.value}. Copy or pickle it after its forward or backward"
        )


@contextmanager
def _taking(units: list[Unit]) -> Iterator[None]:
    """Let modules have None in place of the parameters that `units` put there, which keeps their places. Modules inside
    leave their units to the caller."""
    refs = [each for unit in units for each in unit.flat_refs]
    refs += [each for unit in units if unit.entries.in_place for each in (*unit.param_refs, *unit.shared_refs)]
    before = [each.module._parameters[each.attribute] for each in refs]
    for each in refs:
        each.hold(None)
    _under_way.extend(units)
    try:
        yield
    finally:
        del _under_way[len(_under_way) - len(units) :]
        for each, parameter in zip(refs, before, strict=True):
            each.hold(parameter)


def _attributes(module: nn.Module) -> dict[str, Any]:
    """The attributes of `module` as its class pickles them, without its unit and its methods that gather."""
    left_out = (*OF_UNIT, *module.__dict__.get(REGISTERED, ()))
    of_class = getattr(type(module), "__getstate__", None)
    plain = of_class is None or of_class is getattr(object, "__getstate__", None)
    state = vars(module) if plain else of_class(module)  # type: ignore[misc]  # not None
    return {key: value for key, value in state.items() if key not in left_out}


def lists_of(units: list[Unit]) -> Lists:
    """The lists of units that `units` name, by their numbers among these."""
    numbers = {unit: number for number, unit in enumerate(units)}

    def known(targets: PrefetchTargets[Unit]) -> list[int]:
        return [numbers[unit] for unit in targets.units() if unit in numbers]

    return [[known(getattr(unit.options, name)) for name in _NAMING] for unit in units]


# -- copies ------------------------------------------------------------------------------------------------------------


def deep_copy(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """`copy.deepcopy` of a wrapper or a module of `fully_shard`: parameters, buffers and settings are copied, process
    groups shared."""
    if module.__dict__["_unit"] in _under_way:
        return _copy_attributes(module, memo)
    units = units_at_rest(module)
    with _taking(units):
        for unit in units:
            groups = {group for each in unit.axes.all for group in groups_of(each)}
            meshes = [getattr(handle.options.face, "mesh", None) for handle in unit.handles]
            for shared in (*groups, *meshes, unit.built.device_mesh):
                memo[id(shared)] = shared
        twin = _copy_attributes(module, memo)
        plans = copy.deepcopy(plans_of(module, units), memo)
        twins = build_units(plans, lists_of(units))
    for unit, made in zip(units, twins, strict=True):
        for old, new in zip(unit.handles, made.handles, strict=True):
            holders = zip(old.face.holders, new.face.holders, strict=True)
            memo.update({id(one): two for one, two in holders})  # an optimizer copied with the model refers to it
        hooks = {name: _copied_hook(getattr(unit.options, name), memo, method) for name, method in _HOOKS.items()}
        model_of(made).setup.set_options(made, **hooks)
    return twin


def _copy_attributes(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    cls = type(module)
    plain = getattr(cls, PLAIN_CLASS, cls)
    twin: nn.Module = plain.__new__(plain)
    twin.__class__ = cls
    memo[id(module)] = twin
    twin.__setstate__(copy.deepcopy(_attributes(module), memo))
    return twin


def _copied_hook(hook: T | None, memo: dict[int, Any], method: str) -> T | None:
    """A copy of a user-defined hook, whose process groups are in `memo`; None if it cannot be copied."""
    if id(hook) in memo:  # None if a copy has failed before
        return memo[id(hook)]
    try:
        return copy.deepcopy(hook, memo)
    except Exception as error:  # any error of user-defined state
        warn_once_per_job(
            f"the copy of a sharded model does not have the value that was passed to {method}, which cannot be copied "
            f"({type(error).__name__}: {error}). Call {method} on the copy before it trains"
        )
        memo[id(hook)] = None
        return None


# -- pickles -----------------------------------------------------------------------------------------------------------


def reduce(module: nn.Module, *made_by: Any) -> tuple[Any, ...]:
    """The value of `__reduce_ex__` for `module`, of which `made_by`, a function and its arguments, makes a blank
    instance: every shard once."""
    if module.__dict__["_unit"] in _under_way:
        return made_by[0], made_by[1:], _attributes(module)
    units = units_at_rest(module)
    _refuse_dtensors(units)
    if any(getattr(unit.options, name) is not None for unit in units for name in _HOOKS):
        warn_once_per_job(
            "the pickle of a sharded model does not contain its communication and all-reduce hooks. Register them "
            "again after loading it, before it trains"
        )
    buffer = io.BytesIO()
    with _taking(units):
        torch.save((module, [_pickled(plan) for plan in plans_of(module, units)], lists_of(units)), buffer)
    return _load, (buffer.getvalue(),)


def _refuse_dtensors(units: list[Unit]) -> None:
    """Refuse to pickle parameters that tensor parallelism has split, or that lie on a mesh of their own otherwise."""
    extended = ((unit, each) for unit in units for views in unit.views for each in transformed_in(views))
    held = [(unit, each.param_refs[0]) for unit, each in extended if not each.transform.can_be_pickled(each.state)]
    if names := [fqn(unit.position.name, param_ref.path) for unit, param_ref in held]:
        raise UsageError(
            f"a sharded model with DTensors ({few(names)}) cannot be pickled: they are on a mesh of this job, and "
            "torch's tensor parallelism registers hooks on modules that cannot be pickled. Save its state_dict() "
            "instead"
        )


def _pickled(plan: UnitPlan) -> UnitPlan:
    """`plan` with descriptions of meshes; that of a wrapper is not pickled."""
    if not plan.in_place:
        return replace(plan, mesh=None)
    return _on(plan, lambda mesh, _: (mesh.device_type, mesh.mesh.tolist(), mesh.mesh_dim_names))


def _on(plan: UnitPlan, change: Callable[[Any, ProcessGroups], Any]) -> UnitPlan:
    """`plan` with other meshes, by a function of each mesh and the groups over which it is."""
    handles = []
    for number, settings in enumerate(plan.handles):
        options = settings["options"]
        mesh = change(options.face.mesh, plan.elsewhere.get(number, plan.groups))
        handles.append({**settings, "options": replace(options, face=replace(options.face, mesh=mesh))})
    return replace(plan, mesh=change(plan.mesh, plan.groups), handles=handles)


def blank(cls: type[nn.Module]) -> nn.Module:
    """A wrapper that is not initialized."""
    return cls.__new__(cls)


def _load(data: bytes) -> nn.Module:
    module, plans, lists = torch.load(io.BytesIO(data), weights_only=False)
    meshes: dict[str, Any] = {}

    def mesh_of(described: Any, groups: ProcessGroups) -> Any:
        key = str((described, given_ranks(groups)))
        if key not in meshes:
            meshes[key] = mesh_over(groups, *described)
        return meshes[key]

    for plan in plans:
        for number, settings in enumerate(plan.handles):
            groups = plan.elsewhere.get(number, plan.groups)
            if settings["rank"] != groups.shard.rank:
                raise UsageError(
                    f"this model was pickled on rank {settings['rank']} of its shard group but is loaded on rank "
                    f"{groups.shard.rank}; each rank must load its own pickle"
                )
    build_units([_on(plan, mesh_of) if plan.in_place else plan for plan in plans], lists)
    loaded: nn.Module = module
    return loaded


def _reduce_groups(groups: ProcessGroups) -> tuple[Any, ...]:
    return plan_over, (groups.strategy, given_ranks(groups), groups.device)


copyreg.pickle(ProcessGroups, _reduce_groups)
