"""The units of a model over other ranks: rebuilt in place, over the same parameters.

[Note: regrouped units] A unit, with all that belongs to its ranks (layout, axes, transports, the sequence of operations
that ranks agree on), is made for one set of ranks. Over another one it is made again, from its plan ([Note: plans of
units]), as a copy is, but in the same modules and with the same holders: these are the user's parameters, to which
optimizers refer. The new shards have memory and no values. Nothing is asked of the old ranks, some of which may be
gone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ...errors import AgreementError, UsageError, few
from ..agreement.agreement import agreement_of
from ..base import _torch
from ..base.autograd import is_ours
from ..comm.axes import ProcessGroups
from ..dtensor.extended_handle import ExtendedHandle
from ..features.forward_methods import REGISTERED
from ..flat.flat_param import FlatParamHandle
from ..layout.layout import FlatLayout
from ..models.param_registry import disown
from ..models.rest import check_idle, check_outside, evict, models_of, quiesce
from ..models.walks import units_in
from ..planning.grains import Elements, Whole
from ..planning.planned import PlannedLayout
from ..planning.rows import pack_rows
from ..runtime.iteration import AWAITING_BACKWARD
from ..runtime.model import model_of
from ..runtime.module_tree import put_at_rest
from ..runtime.unit import Unit
from ..transforms.extensions import transformed_in
from .chosen_grains import plan_unit
from .serialization import OF_UNIT, UnitPlan, build_units, lists_of, plans_of


@dataclass(frozen=True)
class Target:
    """The ranks over which a unit is rebuilt: its axes, and the mesh of its distributed parameters, if it has one."""

    groups: ProcessGroups
    mesh: Any = None


class Regrouping:
    """The units of one model, about to be rebuilt over other ranks. Making one changes nothing.

    Attributes:
        units: the present ones, at rest.
        layouts: for each unit the new layout of each of its handles.
        targets: for each unit, its new ranks.
    """

    def __init__(self, module: nn.Module, target_of: Callable[[Unit], Target]) -> None:
        """`module`: the outermost one of its model.

        Raises:
            UsageError: the model cannot be rebuilt, or not now.
        """
        self.units = at_rest(module)
        self.targets = [target_of(unit) for unit in self.units]
        plans = plans_of(module, self.units)
        loads: dict[tuple[int, ...], list[int]] = {}
        made = [_moved(*each, loads) for each in zip(self.units, plans, self.targets, strict=True)]
        self.layouts = [layouts for _, layouts, _ in made]
        orders = [order for _, _, order in made]
        self._plans = [replace(plan, shared=_renumbered(plan, orders)) for plan, _, _ in made]
        self._lists = lists_of(self.units)

    @property
    def check_values(self) -> str:
        """The setting of this name."""
        return self._plans[-1].settings.check_values

    def rebuild(self, *, check_values: str) -> list[Unit]:
        """Put new units in the places of the present ones, which are of no use afterwards. Returns them, in the same
        order; their shards have no values yet.

        `check_values`: that of all ranks: one that has built the model on the meta device has another one."""
        holders = [[_by_name(handle) for handle in unit.handles] for unit in self.units]
        plans = [
            replace(_with_memory(plan), settings=replace(plan.settings, check_values=check_values))
            for plan in self._plans
        ]
        for unit in self.units:
            _take_apart(unit)
        made = build_units(plans, self._lists)
        for unit, of_unit in zip(made, holders, strict=True):
            for handle, before in zip(unit.handles, of_unit, strict=True):
                _keep_holders(handle, before)
            put_at_rest(unit)
        self.units, self._plans = [], []
        return made


def at_rest(module: nn.Module) -> list[Unit]:
    """The units of `module`, the outermost one of its model, at rest and without gradients.

    Raises:
        UsageError: they are not at rest, or cannot be rebuilt.
    """
    units = units_in(module)
    if not units or models_of(units) != [model_of(units[-1])] or model_of(units[-1]).outermost is not units[-1]:
        raise UsageError(
            f"regroup(): {type(module).__name__} is not the outermost module of one sharded model; pass that, so that "
            "all of its units move together"
        )
    outermost = units[-1]
    check_outside(outermost, "regroup()")
    if model_of(outermost).iteration.stage is AWAITING_BACKWARD:
        raise UsageError(
            f"regroup(): a forward of unit {outermost.label} still waits for its backward. Run the backward and the "
            "optimizer's step first; if there will be none, run a forward of the model under torch.no_grad() to end "
            "the wait"
        )
    quiesce(units, collective=False, frees=True, check=lambda unit: check_idle(unit, "regroup()"))
    for unit in units:
        _check(unit)
        evict(unit)
    for each in model_of(outermost).observers.all:
        if each.requested_by:
            raise UsageError(f"regroup(): the model was passed to {each.requested_by}: end that first, on all ranks")
    return units


def release(units: Sequence[Unit], words: str) -> None:
    """Free the memory of the shards of `units`, which keep their layouts; their model refuses to run, in these
    `words`."""
    for unit in units:
        for handle, views, _ in unit.kinds:
            if not handle.shard.is_meta:
                views.replace_shard(handle.shard.new_zeros(()).expand(handle.shard.shape))
    for model in models_of(units):
        agreement_of(model.agreement).peers.decide(AgreementError(words))


def _check(unit: Unit) -> None:
    label = unit.label
    if unit.axes.elsewhere:
        raise UsageError(f"regroup(): unit {label} has parameters that are sharded over other ranks than its others")
    for hook, method in (("comm_hook", "register_comm_hook()"), ("all_reduce_hook", "set_all_reduce_hook()")):
        if getattr(unit.options, hook) is not None:
            raise UsageError(f"regroup(): unit {label} has the value of {method}, which may refer to the present ranks")
    for handle, views in zip(unit.handles, unit.views, strict=True):
        parted = [spec.name for spec in handle.layout.params if spec.part is not None]
        if parted or any(getattr(handle.options.face, "stored", ())):
            raise UsageError(
                f"regroup(): {few(parted or [handle.layout.params[0].name])} of unit {label} were DTensors before they "
                "were sharded (tensor parallelism): their mesh cannot be made smaller or larger. Save a checkpoint, "
                "and load it over the new mesh"
            )
        if isinstance(handle, ExtendedHandle) or transformed_in(views):
            raise UsageError(
                f"regroup(): {handle.layout.params[0].name!r} of unit {label} is stored in another form than modules "
                "see it (gather hooks, extensions), which is of the present ranks. Save a checkpoint and load it"
            )
    waiting = any(grads.accumulation.pending for grads in unit.grads)
    if waiting or any(holder.grad is not None for handle in unit.handles for holder in handle.face.holders):
        raise UsageError(
            f"regroup(): unit {label} has gradients{' of microbatches that are not reduced yet' * waiting}, which "
            "would be lost. Call it after the optimizer's step and zero_grad(set_to_none=True)"
        )


def _moved(
    unit: Unit, plan: UnitPlan, target: Target, loads: dict[tuple[int, ...], list[int]]
) -> tuple[UnitPlan, list[FlatLayout], list[dict[int, int]]]:
    """The plan of `unit` over other ranks, without its shards; for each of its handles the layout there, and the new
    number of each leaf. `loads`: the costs of whole parameters that ranks have, by the ranks."""
    shard = target.groups.shard
    load = loads.setdefault(shard.ranks, [0] * shard.size)
    made, layouts, numbers = [], [], []
    for handle, settings in zip(unit.handles, plan.handles, strict=True):
        layout = _laid_out(handle, shard.size, load)
        at = {spec.name: number for number, spec in enumerate(handle.layout.params)}
        numbers.append([at[spec.name] for spec in layout.params])  # a planned layout may have another order
        options = settings["options"]
        if getattr(options.face, "mesh", None) is not None:
            options = replace(options, face=replace(options.face, mesh=target.mesh))
        kept = {"flat_param": handle.flat_param} if _is_flat(handle) else {}
        like = handle.shard.new_empty(0)  # the old one may be freed before the new one is made
        made.append({**settings, "shard": like, "options": options, "layout": layout, "rank": shard.rank, **kept})
        layouts.append(layout)
    back = [{old: new for new, old in enumerate(of_handle)} for of_handle in numbers]
    leaves = [
        [_fresh(of_handle[old], handle) for old in order]
        for of_handle, order, handle in zip(plan.leaves, numbers, unit.handles, strict=True)
    ]
    moved = replace(
        plan,
        handles=made,
        leaves=leaves,
        homes=[(module, name, path, kind, back[kind][index]) for module, name, path, kind, index in plan.homes],
        groups=target.groups,
        mesh=target.mesh,
        residuals=(),  # of reductions over the present ranks
    )
    return moved, layouts, back


def _renumbered(plan: UnitPlan, orders: Sequence[Sequence[Mapping[int, int]]]) -> list[Any]:
    """The references of `plan` to leaves of other units, whose new numbers are in `orders`, by unit and handle."""
    return [(*at, owner, kind, orders[owner][kind][index]) for *at, owner, kind, index in plan.shared]


def _laid_out(handle: FlatParamHandle, world: int, loads: list[int]) -> FlatLayout:
    """The layout of `handle` over `world` ranks, which have whole parameters of these costs in other units."""
    options, shard, before = handle.options, handle.shard, handle.layout
    align = max(1, 16 // options.precision(shard.dtype).compute.itemsize)
    if isinstance(before, PlannedLayout) and options.plan is not None:  # with the grains that were chosen
        return options.plan(before.params, world=world, align=align, loads=loads)
    if isinstance(before, PlannedLayout):  # of a copy: where it was cut
        cuts = zip(before.params, before.grains, strict=True)
        grains = {spec.name: Whole() if cut == spec.numel else Elements(cut) for spec, cut in cuts if cut > 1}
        home = torch.device("cpu") if options.offload else handle.device
        size = shard.itemsize
        return plan_unit(
            before.params, world=world, align=align, grains=grains, loads=loads, itemsize=size, device=home
        )
    lay_out = pack_rows if options.layout == "rows" else options.face.lay_out
    return lay_out(before.params, world=world, align=align)


def _is_flat(handle: FlatParamHandle) -> bool:
    return any(holder is handle.flat_param for holder in handle.face.holders)


def _fresh(leaf: tuple[Any, type, dict[str, Any]], handle: FlatParamHandle) -> tuple[Any, type, dict[str, Any]]:
    """A leaf of a plan: that of a flat parameter is made anew, as it has hooks of the present unit."""
    original, cls, attributes = leaf
    return (original.requires_grad if _is_flat(handle) else original), cls, attributes


def _with_memory(plan: UnitPlan) -> UnitPlan:
    made = []
    for settings in plan.handles:
        home = torch.device("cpu") if settings["options"].offload else settings["device"]
        shard = torch.zeros(settings["layout"].shard_numel, dtype=settings["shard"].dtype, device=home)
        made.append({**settings, "shard": shard})
    return replace(plan, handles=made)


def _take_apart(unit: Unit) -> None:
    """Let nothing refer to `unit` that a new one is about to take its place in."""
    disown(unit)
    for handle, views in zip(unit.handles, unit.views, strict=True):
        views.give_back()
        for holder in handle.face.holders:
            registered = _torch.hooks_on(holder) or {}
            for key in [key for key, hook in registered.items() if is_ours(hook)]:
                del registered[key]
    for entry in unit.entries if unit.entries.in_place else ():
        for name in entry.__dict__.get(REGISTERED, ()):
            entry.__dict__.pop(name, None)  # the method that gathers; it is registered again
        for name in OF_UNIT:
            entry.__dict__.pop(name, None)


def _by_name(handle: FlatParamHandle) -> dict[str, nn.Parameter]:
    return {spec.name: handle.face.holder_of(index) for index, spec in enumerate(handle.layout.params)}


def _keep_holders(handle: FlatParamHandle, before: Mapping[str, nn.Parameter]) -> None:
    """Let the parameters of a handle that was replaced, by their names, be the holders of `handle`."""
    face = handle.face
    for index, spec in enumerate(handle.layout.params if face.users_swap_holders else ()):
        held, made = before[spec.name], face.holders[index]
        if held.device != made.device:  # it was on the meta device
            torch.utils.swap_tensors(held, made)
        face.adopt(index, held)
