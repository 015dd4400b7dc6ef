"""Writes of users to the parameters of a unit, tensors that they assign instead, and units that they unshard.

[Note: writes at rest] Between iterations users may write to holders, which show the shard, or give a module another
parameter. Both are detected before the unit is gathered again, by versions and identities, without reading values.

[Note: unnoticed writes] Original parameters and DTensors count no version for in-place writes to their `.data`, and
DTensors none for writes to a list of them (`torch._foreach_*`). So if such parameters are kept unsharded, they are
compared with the shard, value by value, before a computation uses them: this reads twice the shard, where a gather
would move all of the parameter. If they are still being gathered, the shard is compared with a copy. Values may change
on some ranks only, so ranks exchange a flag after comparisons, before any of them gathers: at the first gather of a
forward, for parameters that are kept by choice or stay on the device, and when a user requests such a unit. A
comparison waits for the device: on accelerators it is made only for parameters that the schedule keeps, for which ranks
exchange a flag in any case, and never for a unit that is `trusted`. Parameters that are quantized in gathers, or
transformed by hooks of their class, have other values than the shard: only their versions are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch

from ..base import _torch
from ..base.overrides import is_memoryless
from ..base.peers import Peers
from ..flat.flat_param import FlatParamHandle
from ..flat.layout_views import own_pieces_of
from ..flat.param_refs import ParamRef, check_param_refs, refuse_functional_call
from ..flat.states import GATHERING, SHARDED, SUMMONED, UNSHARDED
from ..flat.views import SHOWS_SHARD, SHOWS_UNSHARDED, check_exposed, check_places, check_requested, refuse_writes
from .unit import Unit


def write_back(unit: Unit, names: Callable[[], Mapping[int, str]], *, looks: bool) -> bool:
    """Take over tensors that the user assigned instead of parameters; free a kept buffer that is out of date. True if
    the dtype of a shard has changed.

    `names`: returns the names of all parameters of the model, by id. `looks`: modules of some units hold other objects
    than they should.

    Raises:
        UsageError: for changes that cannot be taken over.
    """
    changed = ParamRef.changed((*unit.param_refs, *unit.shared_refs)) if looks else []
    if changed:  # in nested state dicts, placeholders of the outer one are not assigned by a user
        changed = [each for each in changed if not getattr(type(each.current), "stands_in", False)]
    if changed and _torch.in_functional_call():
        refuse_functional_call(changed, unit.label)
    if changed and unit.shows_shard:
        changed = [each for each in changed if not _holds_leaf_again(unit, each)]
        check_param_refs(changed, unit.shared_refs, names(), unit.label)
    cast = False
    for kind, (handle, views, _) in enumerate(unit.kinds):
        if views.mode is SHOWS_SHARD:
            before = handle.precision
            if handle.state is UNSHARDED and handle.flat_param.dtype != handle.shard.dtype:
                unit.resources.free(handle)  # before its shard is replaced
            wrote = views.write_back(changed, unit.resources.free)
            cast = cast or handle.precision is not before
            if handle.state is UNSHARDED and (wrote or _is_stale(unit, handle)):
                unit.resources.free(handle)
            elif handle.state is GATHERING and _is_stale_on_its_way(unit, kind):
                handle.wait_unshard()
                unit.resources.free(handle)
            if handle.kept_source is not None and handle.state is SHARDED:
                handle.drop_stale_source()
                if _differs(unit, handle):
                    handle.drop_kept_source()
        elif unit.phase is not SUMMONED:  # else users may write to the parameters
            if handle.state is GATHERING and handle.writes.was_written_since_gathered:
                handle.wait_unshard()
                unit.resources.free(handle)
            check_exposed(views)
            if handle.face.is_distributed and handle.state is UNSHARDED and _differs(unit, handle):
                refuse_writes(views, "between forward and backward")
            if changed:
                check_places(views)
    return cast


def _holds_leaf_again(unit: Unit, param_ref: ParamRef) -> bool:
    """Whether a module holds the leaf itself in this place, which has changed and should have its holder at rest: code
    such as `functional_call` has restored the tensor from before the shards were shown. Puts the holder back."""
    if param_ref.current is not param_ref.leaf:
        return False
    for handle in [handle for each in (unit, *unit.owning_units) for handle in each.handles]:
        if any(leaf is param_ref.leaf for leaf in handle.leaves):
            handle.face.put(param_ref)
            return True
    return False


def _is_stale(unit: Unit, handle: FlatParamHandle) -> bool:
    """Whether kept parameters differ from those that a gather would yield: the shard was written to since, or the dtype
    is that of evaluation, and this is training."""
    return handle.writes.is_stale or handle.unsharded.dtype != unit.dtype_of(handle) or _differs(unit, handle)


def _is_stale_on_its_way(unit: Unit, kind: int) -> bool:
    """`_is_stale` for parameters that are being gathered on a user's request."""
    handle, kept = unit.handles[kind], unit.kept
    if handle.writes.all != kept.versions[kind]:
        return True
    return bool(kept.shards) and not torch.equal(_bits(handle.shard.detach()), _bits(kept.shards[kind]))


def _differs(unit: Unit, handle: FlatParamHandle) -> bool:
    """Whether parameters that are kept, unsharded or as a copy, have other values than the shard, if only a comparison
    shows it. [Note: unnoticed writes]"""
    if handle.state is SHARDED:
        flat = handle.kept_source.copy if handle.kept_source is not None else None
    else:
        flat = handle.unsharded.flat if handle.unsharded.buffer is not None else None
    if flat is None or not is_compared(unit, handle):
        return False
    found = own_pieces_of(flat, handle.layout, handle.rank)
    if all(
        torch.equal(_bits(piece.detach().to(flat.device, flat.dtype)), _bits(own.detach()))
        for piece, own in zip(handle.at_rest.pieces, found, strict=True)
    ):
        return False
    unit.kept.maybe_stale = True  # other ranks may have found nothing
    return True


def is_compared(unit: Unit, handle: FlatParamHandle) -> bool:
    """Whether the values of kept parameters of `handle` are compared: the same on all ranks."""
    # all writes to a flat parameter change its version
    if handle.face.is_flat or handle.precision.gather is not None or not handle.gathers_elements:
        return False
    if unit.kept.trusted or is_memoryless():
        return False
    keeps = unit.options.schedule.keeps_by_choice and handle.persistence is None
    return keeps or not unit.resources.device.has_streams


_WHOLE_NUMBERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(values: torch.Tensor) -> torch.Tensor:
    """`values` as integers, all of which, unlike NaN, are equal to themselves."""
    return values.view(_WHOLE_NUMBERS[values.itemsize]) if values.itemsize in _WHOLE_NUMBERS else values


def apply_shard_writes(unit: Unit) -> None:
    """Free parameters that were gathered before a write to the shards earlier in this forward: the unit is to compute
    with the written values. [Note: shards by hand]"""
    for handle, views, _ in unit.kinds:
        if views.mode is not SHOWS_SHARD:
            continue
        if handle.face.is_flat and not handle.flat_shows_shard:
            views.adopt_flat()
        if handle.state is not SHARDED and handle.writes.was_written_since_gathered:
            if handle.state is GATHERING:
                handle.wait_unshard()
            unit.resources.free(handle)


def check_left_unsharded(unit: Unit) -> None:
    """Refuse writes to parameters that a forward has left unsharded, and that are about to be freed.

    Precondition: no backward has reached the unit since.
    """
    for views in unit.views:
        if views.mode is SHOWS_UNSHARDED and unit.phase is not SUMMONED:
            check_exposed(views)


def follow_other_ranks(units: Iterable[Unit], agreement: Peers) -> None:
    """Free those of `units` that are kept by choice, to be gathered again, if any rank has written to its shards.
    Collective if there are any. An optimizer writes on some ranks only, if others have no element of a unit.
    """
    kept = [unit for unit in units if unit.kept.by_choice]
    if kept and agreement.any_rank(not all(unit.is_unsharded for unit in kept)):
        for unit in kept:
            unit.reshard(SHOWS_SHARD)
    for unit in kept:
        unit.kept.end_choice()


def retire_request(unit: Unit, *, written: bool) -> None:
    """Check a unit that a user unsharded between iterations, and free it if the shard was `written` to since, or is
    about to be: it will be gathered again.

    Raises:
        UsageError: for tensors that a user assigned instead of parameters.
    """
    keeps = unit.kept.by_choice or (not unit.axes.is_spread and unit.is_unsharded)
    # Leaves that show nothing, as a forward has left them, cannot be written to during a gather.
    shown = [views for views in unit.views if views.mode is SHOWS_UNSHARDED]
    if keeps and shown:
        stale = any([views.handle.writes.is_stale or _differs(unit, views.handle) for views in shown])
        try:
            for views in shown:
                check_requested(views)
        finally:
            if written or stale or any([views.displaced for views in shown]):
                unit.reshard(SHOWS_SHARD)
