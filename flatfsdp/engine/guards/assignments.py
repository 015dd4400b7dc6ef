"""Tensors that users assign instead of parameters: their values are taken over into the shards, or refused.

That happens between iterations, where users see the shard: before it is gathered again, or read. Replacements for a
`.data`, for a parameter in its module, and for the `.data` of a flat parameter are found by identities, without reading
values.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Sequence
from typing import NoReturn

import torch
from torch import nn

from ...errors import UsageError
from ..base import _torch
from ..base.autograd import hooks_of_users
from ..base.events import Observer
from ..flat.faces import adoptions
from ..flat.flat_param import FlatParamHandle
from ..flat.layout_views import dense
from ..flat.param_refs import ParamRef
from ..flat.states import SHARDED, SUMMONED, UNSHARDED
from ..flat.views import SHOWS_SHARD, ParamViews
from ..models.unnoticed_writes import differs, is_stale
from ..models.walks import names_of_leaves
from ..runtime.model import model_of
from ..runtime.unit import Unit
from ..transforms.extensions import marks_of
from .lost_writes import check_again


class AssignedTensors(Observer):
    """Takes over what users assigned to parameters of one model."""

    def takes_over(self, units: Sequence[Unit]) -> None:
        """Take over tensors that users assigned instead of parameters of `units`.

        Raises:
            UsageError: for changes that cannot be taken over.
        """
        # Of all units at once: seldom any module holds another object than it should.
        looks = bool(ParamRef.changed([each for unit in units for each in (*unit.param_refs, *unit.shared_refs)]))
        cast = True  # also after an error half-way
        try:
            cast = any([_take_over(unit, looks=looks) for unit in units])
        finally:
            if cast and units:
                setup = model_of(units[0]).setup
                setup.coalescer.measure(setup.units)  # units of another dtype have another size


def _take_over(unit: Unit, *, looks: bool) -> bool:
    """Take over what was assigned to parameters of `unit`. True if the dtype of a shard has changed. `looks`: modules
    of some units hold other objects than they should."""
    changed = ParamRef.changed((*unit.param_refs, *unit.shared_refs)) if looks else []
    if changed:  # in nested state dicts, placeholders of the outer one are not assigned by a user
        changed = [each for each in changed if not getattr(type(each.current), "stands_in", False)]
    if changed and _torch.in_functional_call():
        refuse_functional_call(changed, unit.label)
    if changed and unit.shows_shard:
        changed = [each for each in changed if not _holds_leaf_again(unit, each)]
        check_param_refs(unit, changed)
    cast = False
    for handle, views, _ in unit.kinds:
        if views.mode is SHOWS_SHARD:
            before = handle.precision
            wrote = _write_back(unit, views, changed)
            if handle.state is not SHARDED and (wrote or is_stale(unit, handle)):
                unit.resources.free(handle)
            if handle.kept_source is not None and handle.state is SHARDED:
                handle.drop_stale_source()
                if differs(unit, handle):
                    handle.drop_kept_source()
            cast = cast or handle.precision is not before
        elif unit.phase is not SUMMONED:  # else users may write to the parameters
            check_again(unit, views, looks=bool(changed))
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


# -- into the shard ----------------------------------------------------------------------------------------------------


def _write_back(unit: Unit, views: ParamViews, changed: Iterable[ParamRef]) -> bool:
    """Copy users' replacements for holders into the shard; True if there were any.

    These are a replaced `.data`, a parameter in one of the `changed` references, and a flat parameter whose `.data` was
    replaced. Raises UsageError if shape or dtype does not fit. Precondition: users see the shard.
    """
    handle = views.handle
    face = handle.face
    # Before modules hold our parameters again.
    put = [(param_ref, param_ref.current) for param_ref in changed] if changed else []
    if found := not handle.flat_shows_shard:
        if handle.state is UNSHARDED:
            unit.resources.free(handle)
        _adopt_flat(views)
    if face.users_swap_holders and (replaced := face.replaced()):
        found = True
        holders = [face.holder_of(i) for i in replaced]
        values = [face.value_of(i, holder) for i, holder in zip(replaced, holders, strict=True)]
        words = [f"the value of the parameter {handle.layout.params[i].name!r}" for i in replaced]
        _store_assigned(unit, views, replaced, values, words)
        for i, holder in zip(replaced, holders, strict=True):
            _adopt(handle, i, holder)
    if replaced := handle.at_rest.replaced():
        found = True
        shown = [parameter for parameter, _ in handle.at_rest.shown]
        dtypes = {each.dtype for each in shown}
        if len(replaced) == len(shown) and len(dtypes) == 1 and dtypes != {handle.shard.dtype}:
            raise UsageError(
                f"the parameters of unit {handle.label} were converted from {handle.shard.dtype} to {dtypes.pop()} one "
                "by one after wrapping; call .to()/.half()/.double() on the FullyShardedDataParallel module itself, or "
                "before wrapping"
            )
        words = [f"the .data of {handle.layout.params[i].name!r}" for i in replaced]
        _store_assigned(unit, views, replaced, [shown[i].detach() for i in replaced], words)
        views.show_again()
    taken = []
    for param_ref, held in put:
        index = next((i for i, leaf in enumerate(handle.leaves) if leaf is param_ref.leaf), None)
        if index is not None and isinstance(held, nn.Parameter):
            taken.append((param_ref, held, index, unaliased(face.value_of(index, held), handle.shard)))
    for param_ref, held, index, value in taken:
        _store(views, index, value, f"the parameter now registered as {param_ref.path!r}")
        _adopt(handle, index, held)
        param_ref.hold(param_ref.leaf)  # also in a recurrent module's list, which `put` may not update
        face.put(param_ref)
        found = True
    return found


def _store_assigned(
    unit: Unit, views: ParamViews, indices: Sequence[int], values: Sequence[torch.Tensor], words: Sequence[str]
) -> None:
    """Store the `values` of some leaves, whose `.data` users replaced, in a shard with memory of its own."""
    handle = views.handle
    for index, value, what in zip(indices, values, words, strict=True):
        _check_fits(handle, index, value, what)
    if not handle.shard.is_meta and handle.state in (SHARDED, UNSHARDED):
        if handle.state is UNSHARDED:
            unit.resources.free(handle)
        if handle.has_memory:
            _move_shard(views, handle.shard)
        else:
            handle.drop_kept_source()
    for index, value, what in zip(indices, values, words, strict=True):
        _store(views, index, value, what)


def _move_shard(views: ParamViews, values: torch.Tensor) -> None:
    """Replace the shard by a copy of `values`.

    [Note: assigned memory] `kept = p.data; p.data = average; ...; p.data = kept` is how programs put weights aside:
    `kept` is a view of the shard, which a copy of `average` into it would overwrite. So values that come by assignment
    go to new memory, and `kept` stays as it is. The assigned tensor itself is not used: later changes of it have no
    effect.
    """
    handle = views.handle
    handle.drop_kept_source()
    with torch.inference_mode(False):  # used in training, even if the next forward is in inference mode
        views.replace_shard(values.detach().to(handle.shard.device, copy=True))


def _adopt_flat(views: ParamViews) -> None:
    """Copy a user's replacement for the flat parameter's `.data` into the shard."""
    handle = views.handle
    flat = handle.flat_param
    if flat.shape != handle.shard.shape:
        raise UsageError(
            f"the flat parameter of unit {handle.label} was assigned data of shape {tuple(flat.shape)}; expected this "
            f"rank's shard, {tuple(handle.shard.shape)}"
        )
    if flat.dtype != handle.shard.dtype:
        views.replace_shard(flat.detach())
    elif handle.state is SHARDED:
        _move_shard(views, flat)
    else:
        with torch.no_grad():
            handle.shard.copy_(flat.detach())
        views.show_flat(handle.shard)


# The leaves whose places in a shard came from the meta device, and have no values yet.
_without_values: weakref.WeakKeyDictionary[FlatParamHandle, frozenset[int]] = weakref.WeakKeyDictionary()


def without_values(handle: FlatParamHandle) -> frozenset[int]:
    """The leaves of `handle` that came from the meta device, and have no values yet."""
    return _without_values.get(handle, frozenset())


def _store(views: ParamViews, index: int, value: torch.Tensor, what: str) -> None:
    """Copy this rank's piece of `value` to the place of leaf `index` in the shard."""
    handle = views.handle
    if handle.shard.is_meta:
        home = torch.device("cpu") if handle.options.offload else handle.device
        views.replace_shard(torch.zeros_like(handle.shard, device=home))
        _without_values[handle] = frozenset(range(len(handle.leaves)))
    if without := without_values(handle):
        _without_values[handle] = without - {index}
    _check_fits(handle, index, value, what)
    if not handle.has_memory:
        return  # the face keeps the value
    view, spec = handle.at_rest.views[index], handle.layout.params[index]
    with torch.no_grad():
        if value.shape == view.shape:
            view.copy_(value)
            return
        for owned in handle.layout.owned(handle.rank):
            if owned.index == index:
                # In the order of the parameter's memory, which may differ from the value's.
                laid_out = value.contiguous() if spec.stride is None else _strided_like(value, spec.stride)
                handle.shard[owned.in_shard.slice].copy_(dense(laid_out)[owned.in_param.slice])


def _check_fits(handle: FlatParamHandle, index: int, value: torch.Tensor, what: str) -> None:
    """Refuse a `value` for leaf `index` that fits neither this rank's piece of it nor the whole parameter."""
    view, spec = handle.at_rest.views[index], handle.layout.params[index]
    if value.dtype != view.dtype:
        raise UsageError(f"{what} has dtype {value.dtype}; expected the shard's {view.dtype}")
    if value.shape != view.shape and tuple(value.shape) != spec.shape:
        raise UsageError(
            f"{what} was replaced by a tensor of shape {tuple(value.shape)}; expected this rank's shard of it, "
            f"{tuple(view.shape)}, or the full parameter, {spec.shape}. Inside summon_full_params(), parameters have "
            "their full shape"
        )


def unaliased(value: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """`value`, a copy if it is a view of `memory`, into which it will be written: a transpose of what is there, or a
    value that was exchanged with another one."""
    if value.untyped_storage()._cdata == memory.untyped_storage()._cdata:
        return value.clone()
    return value


def _strided_like(value: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """`value` with these strides; itself if it has them."""
    if value.stride() == stride:
        return value
    return torch.empty_strided(value.shape, stride, dtype=value.dtype, device=value.device).copy_(value)


def abandon(views: ParamViews, index: int) -> None:
    """Stop training leaf `index`, which no module holds any more, and do not wait for its values."""
    handle = views.handle
    handle.face.holder_of(index).requires_grad_(False)
    view = handle.at_rest.views[index]
    if view.is_meta or index in without_values(handle):
        _store(views, index, torch.zeros(view.shape, dtype=view.dtype, device=handle.device), "an unused parameter")


# -- replacements for holders ------------------------------------------------------------------------------------------

# Parameters of which only the values were taken, by their ids, with the name of the holder that stayed.
_passed_over: dict[int, tuple[weakref.ref[nn.Parameter], str]] = {}


def _adopt(handle: FlatParamHandle, index: int, held: nn.Parameter) -> None:
    """Make a user's replacement for a holder the holder itself, if the handle's face allows it."""
    face, leaf = handle.face, handle.leaves[index]
    if vars(held) is not vars(leaf):
        vars(leaf).update(marks_of(held))
    if face.adopt(index, held):
        handle.writes.on_replacement()
    else:
        holder = face.holder_of(index)
        fits = held.grad is not None and held.grad.shape == holder.shape
        holder.grad = held.grad if fits else None  # a window drops the one before, too
        pass_over(held, handle.layout.params[index].name)


def pass_over(held: nn.Parameter, name: str) -> None:
    """Record that the holder called `name` stays one, and that only values were taken from its replacement."""
    adoptions.count += 1
    key = id(held)

    def forget(gone: weakref.ref[nn.Parameter]) -> None:
        if (found := _passed_over.get(key)) is not None and found[0] is gone:
            del _passed_over[key]

    _passed_over[key] = weakref.ref(held, forget), name


def name_in_place_of(parameter: torch.Tensor) -> str | None:
    """The name of the holder that stayed when only values were taken from `parameter`."""
    found = _passed_over.get(id(parameter))
    return found[1] if found is not None and found[0]() is parameter else None


# -- refusals ----------------------------------------------------------------------------------------------------------


def check_param_refs(unit: Unit, changed: Iterable[ParamRef]) -> None:
    """Refuse `changed` references of `unit` that cannot be written back: only new values for a parameter can be."""
    names = names_of_leaves(model_of(unit).units)
    met: dict[int, ParamRef] = {}
    for param_ref in changed:
        held, where = param_ref.current, f"{param_ref.path!r} of unit {unit.label} was changed after wrapping"
        if held is None:
            raise UsageError(f"{where}: it was deleted. Delete parameters before wrapping, or keep them")
        if not isinstance(held, nn.Parameter):
            raise UsageError(
                f"{where}: it is a {type(held).__name__} now; expected that parameter or a new nn.Parameter"
            )
        first = met.setdefault(id(held), param_ref)
        if id(held) in names or first.leaf is not param_ref.leaf:
            raise UsageError(
                f"{where}: it was tied to {names.get(id(held), first.path)!r}. Wrapping determines which unit owns a "
                "tied parameter; tie parameters before wrapping"
            )
        if hooks_of_users(held) or _torch.hooks_on(held):
            raise UsageError(
                f"{where}: it is a different parameter now, which has hooks. Its values would be copied into the "
                "parameter that was wrapped, which stays in place, so the hooks would never run. Assign the "
                "parameter, run a forward, and register the hooks then; or copy the values into the existing parameter"
            )
        tied = [each for each in unit.param_refs if each.leaf is param_ref.leaf and each.current is each.held]
        if tied or any(param_ref is alias for alias in unit.shared_refs):
            other = tied[0].path if tied else names.get(id(param_ref.leaf), "a parameter of another unit")
            raise UsageError(
                f"{where}: it was tied to {other!r}, and is a different parameter now. Untie parameters before "
                "wrapping, or copy values in place"
            )


def refuse_functional_call(changed: Iterable[ParamRef], label: str) -> NoReturn:
    """Refuse to compute with tensors that functional_call put in the place of the `changed` references."""
    names = ", ".join(repr(param_ref.path) for param_ref in itertools.islice(changed, 3))
    raise UsageError(
        f"torch.func.functional_call passed other tensors for {names} to unit {label}: a wrapped model computes only "
        "with its own parameters, and these tensors would be written into its shards. Use functional_call on the "
        "model before wrapping, write values inside summon_full_params(), or load them with load_state_dict()"
    )
