"""Writes of users to unsharded parameters. They are lost when that memory is freed, so they are refused before it is.

A write is an increment of a version since the memory was filled, a replaced `.data`, or another object in the place of
a leaf. Between a forward and its backward, writes to shards of unsharded parameters are refused, too: the backward
would not compute with them.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from typing import NoReturn

import torch
from torch import nn

from ...errors import UsageError, fail
from ..base._functorch import modes_active
from ..base._torch import as_plain_tensors
from ..flat.faces import own_grad, set_own_grad
from ..flat.flat_param import FlatParamHandle
from ..flat.guard import ORIGINAL, Guard
from ..flat.param_refs import ParamRef
from ..flat.states import SUMMONED, UNSHARDED, Left
from ..flat.views import SHOWS_SHARD, SHOWS_UNSHARDED, ParamViews
from ..flat.write_tracker import VERSION
from ..models.unnoticed_writes import differs, is_stale
from ..runtime.unit import Unit

_FACTS = torch.Tensor.data_ptr, attrgetter("shape"), torch.Tensor.stride


class WriteGuard(Guard):
    """Looks for writes to unsharded parameters."""

    def check_computed(self, unit: Unit) -> None:
        """A forward has computed with the parameters of `unit`: refuse changes that would be lost with their memory."""
        for handle, views, _ in unit.kinds:
            if handle.state is UNSHARDED:
                if handle.options.packed:
                    _keep_packed(views, unit.param_refs)
                if handle.unsharded.buffer is None:
                    continue
                writes = handle.writes
                # As `was_edited`, whose call every unit would take.
                found = list(map(VERSION, writes.counted)) if writes.only is None else [writes.only._version]
                if found != writes.known or _was_replaced(views):
                    try:
                        _refuse(views, "inside a forward")
                    finally:
                        handle.face.take_back()  # else their values would be taken at rest

    def check_used(self, unit: Unit) -> None:
        """A backward is about to compute with the parameters of `unit`: refuse changes of unsharded ones."""
        for handle, views, _ in unit.kinds:
            if handle.state is UNSHARDED:
                with as_plain_tensors():
                    if handle.writes.is_stale or _was_replaced(views):
                        _refuse(views)

    def check_left(self, unit: Unit) -> None:
        """Refuse changes of parameters of `unit` that a forward has left, no backward has reached, and may be freed."""
        for handle, views, _ in unit.kinds:
            if handle.state is UNSHARDED and views.left is not Left.COMPUTING and unit.phase is not SUMMONED:
                with as_plain_tensors():
                    # If the shard is the whole parameter, in-place writes are kept; replacements are not.
                    stale = handle.unsharded.buffer is not None and handle.writes.is_stale
                    if stale or _was_replaced(views):
                        _refuse(views)

    def end_request(self, unit: Unit, *, written: bool) -> None:
        """Refuse changes of parameters that a user unsharded; free them if the shard was `written` to since, or is
        about to be: they will be gathered again."""
        keeps = unit.kept.by_choice or (not unit.axes.is_spread and unit.is_unsharded)
        # Leaves that show nothing, as a forward has left them, cannot be written to during a gather.
        shown = [views for views in unit.views if views.mode is SHOWS_UNSHARDED]
        if keeps and shown:
            stale = any([is_stale(unit, views.handle) for views in shown])
            try:
                for views in shown:
                    _check_requested(views)
            finally:
                if written or stale or any([_displaced(views) for views in shown]):
                    unit.reshard(SHOWS_SHARD)


def check_again(unit: Unit, views: ParamViews, *, looks: bool) -> None:
    """Another forward is about to compute with parameters that show no shard, before a backward has: refuse changes of
    them, and other memory of holders; if it `looks`, also other objects in the places of holders. Their values are
    taken at rest, and until then their gradients would be lost."""
    handle = views.handle
    if handle.state is UNSHARDED:
        with as_plain_tensors():
            if handle.writes.is_stale or _was_replaced(views):
                _refuse(views)
        if not views.guarded and differs(unit, handle):
            _refuse(views)
    if looks and (displaced := _displaced(views)):
        _refuse(views, indices=displaced)
    # Other memory of holders is taken over at rest, too: this forward would compute with the shard.
    if handle.face.users_swap_holders:
        if replaced := handle.face.replaced():
            _refuse(views, indices=replaced)
    elif not handle.flat_shows_shard:
        _refuse(views, indices=range(len(handle.leaves)))


# -- changes -----------------------------------------------------------------------------------------------------------


def _was_replaced(views: ParamViews) -> bool:
    """Whether leaves do not show the unsharded form: the user replaced their `.data`, maybe by another view of the same
    memory, or the objects that modules hold in their places. Only while unsharded."""
    if views.mode is not SHOWS_UNSHARDED or views.some_hidden:
        return False
    handle = views.handle
    leaves, expected = handle.leaves, handle.unsharded.views
    with as_plain_tensors():
        # `is_set_to` is an operation of torch: modes would see it, and wrapper subclasses do not have it.
        alike = not (handle.unsharded.has_inner or modes_active()) and _are_set_to(leaves, expected)
        for fact in () if alike else _FACTS:
            if list(map(fact, leaves)) != list(map(fact, expected)):
                return True
    displaced = handle.face.displaced() if views.left is not Left.SET_ASIDE else None
    return bool(displaced and _displaced(views))


def _are_set_to(tensors: Iterable[torch.Tensor], others: Iterable[torch.Tensor]) -> bool:
    """Whether each of `tensors` has the memory, shape and strides of the other. False if that is not known."""
    try:
        return all(map(torch.Tensor.is_set_to, tensors, others))
    except RuntimeError:  # of another kind: on another device, sparse
        return False


def _displaced(views: ParamViews) -> set[int]:
    """The leaves in whose places users have put other objects while leaves are unsharded: of those that modules should
    hold themselves. In place of others they hold tensors made from them, and packed ones may get another parameter
    around their bytes."""
    handle = views.handle
    if not (displaced := handle.face.displaced()):
        return displaced
    made = {id(each.leaf) for each in views.extended}
    return {i for i in displaced if not (handle.options.packed or id(handle.leaves[i]) in made)}


def _keep_packed(views: ParamViews, param_refs: Iterable[ParamRef]) -> None:
    """Keep modules' changes to quantized weights, which are unsharded, valid. [Note: packed bytes]

    A new parameter around the same bytes, which carries the state for dequantization, is our leaf with that
    state. Bytes in another order are refused: the next gather brings the original ones, which do not fit that state.
    """
    handle = views.handle
    for spec, (leaf, view) in zip(handle.layout.params, handle.unsharded.shown, strict=True):
        if leaf.shape != view.shape or leaf.dtype != view.dtype:
            fail(
                UsageError(
                    f"parameter {spec.name!r} of unit {handle.label}: its forward replaced the .data of a quantized "
                    f"weight, {tuple(view.shape)}, by {tuple(leaf.shape)} of {leaf.dtype}, which would be lost when "
                    "the unit is freed. bitsandbytes does this in evaluation on CPUs with AVX512-BF16: set "
                    "support_avx512bf16_for_cpu = False on its modules before the model is evaluated for the first "
                    "time"
                )
            )
    leaves = set(map(id, handle.leaves))
    for param_ref in ParamRef.changed([param_ref for param_ref in param_refs if id(param_ref.leaf) in leaves]):
        held = param_ref.current
        if isinstance(held, nn.Parameter) and held.data_ptr() == param_ref.leaf.data_ptr():
            of_leaf = next(i for i, leaf in enumerate(handle.leaves) if leaf is param_ref.leaf)
            for each in (param_ref.leaf, param_ref.held, handle.face.originals[of_leaf]):
                each.__class__ = views.guard.hidden[type(held)] if type(each) in ORIGINAL else type(held)
            vars(param_ref.leaf).update(vars(held))
            handle.face.put(param_ref)
            views.note_classes()


# -- refusals ----------------------------------------------------------------------------------------------------------


def _check_requested(views: ParamViews) -> None:
    """Refuse a change of parameters that a user unsharded, or of their gradients: it would be lost with that memory.

    Precondition: the leaves are unsharded.
    """
    handle = views.handle
    is_copy = handle.unsharded.buffer is not None
    if is_copy and handle.writes.was_edited:
        _refuse(views, "while they were unsharded by unshard()")
    entries = zip(handle.layout.params, handle.unsharded.shown, handle.at_rest.views, strict=True)
    for spec, (leaf, view), piece in entries:
        replaced = leaf.data_ptr() != view.data_ptr() or leaf.shape != view.shape or leaf.dtype != view.dtype
        grad = own_grad(leaf)
        if unsharded_grad := grad is not None and (is_copy or grad.shape != piece.shape):
            set_own_grad(leaf, None)  # its shape does not fit once the leaf shows its shard
        if replaced or unsharded_grad:
            views.show_anew()
            raise UsageError(
                f"parameter {spec.name!r} of unit {handle.label}: its {'.data' if replaced else '.grad'} was replaced "
                "while it was unsharded by unshard(). That memory is freed after its use, and the new value would be "
                "lost with it. Replace it while the parameter is sharded, or inside summon_full_params()"
            )


def _refuse(views: ParamViews, when: str = "between forward and backward", indices: Iterable[int] = ()) -> NoReturn:
    """`indices`: of the parameters, if that is known."""
    views.show_anew()
    handle = views.handle
    edited = [handle.layout.params[i].name for i in sorted(indices)]
    changed = edited or _edited(handle) or _replaced(views) or _unlike_shard(handle) or ["this rank's shards"]
    raise UsageError(
        f"unit {handle.label}: parameters were written to {when}: {', '.join(changed)}. The backward would use "
        "different values than the forward, or the write would be lost; write to parameters before the forward or "
        "after the backward"
    )


def _edited(handle: FlatParamHandle) -> list[str]:
    """The names of leaves that were written to in place. Of those that share a counter, the ones whose elements on this
    rank show it; else all that may be. [Note: one counter]"""
    counted, edited = handle.counted, {id(handle.counted[i]) for i in handle.writes.edited}
    named = [(id(leaf), spec.name) for leaf, spec in zip(handle.leaves, handle.layout.params, strict=True)]
    found = [name for leaf, name in named if leaf in edited]
    if counted is not handle.leaves and id(counted[0]) in edited:
        alone = set(map(id, counted))
        together = [name for leaf, name in named if leaf not in alone]
        unlike = set(_unlike_shard(handle)) if handle.precision.gather is None else ()
        found += [name for name in together if name in unlike] or [f"one of {', '.join(together)}"]
    return found


def _replaced(views: ParamViews) -> list[str]:
    """The names of leaves that users have replaced."""
    shown = enumerate(views.handle.unsharded.shown)
    with as_plain_tensors():
        found = {i for i, (leaf, view) in shown if any(fact(leaf) != fact(view) for fact in _FACTS)}
    if views.left is not Left.SET_ASIDE:  # else they are found at rest
        found |= _displaced(views)
    return [spec.name for i, spec in enumerate(views.handle.layout.params) if i in found]


def _unlike_shard(handle: FlatParamHandle) -> list[str]:
    """The names of leaves of which this rank's elements differ from the shard. Waits for the device."""
    if handle.unsharded.buffer is None or handle.unsharded.has_inner:
        return []
    flat, found = handle.unsharded.flat, []
    with as_plain_tensors():
        for owned in handle.layout.owned(handle.rank):
            span, spec = handle.layout.spans[owned.index], handle.layout.params[owned.index]
            used = flat[span.slice][owned.in_param.slice]
            if not torch.equal(handle.shard[owned.in_shard.slice].to(used.device, used.dtype), used):
                found.append(spec.name)
    return found
