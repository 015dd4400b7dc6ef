"""The memory that leaves and users' parameters show. Only this file assigns a parameter's `.data` (a test looks);
other files only pass on what users assign.

[Note: view modes] A leaf has the shape of its parameter at any time, and shows the unsharded buffer, whose storage
comes and goes. A handle's leaves show the *unsharded* parameters, or *nothing*. They show nothing at rest, where users
meet holders that show the *shard*, and between a forward that resharded and the backward. If the shard itself is the
unsharded parameter, leaves always show it. A guard may refuse the use of leaves that show nothing, and of holders from
the beginning of a forward to the end of its backward: it has another class for them (`LeafClasses`).
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import repeat
from operator import attrgetter
from typing import Any, NoReturn, Protocol

import torch
from torch import nn

from ...errors import UsageError, fail
from ..base._functorch import modes_active
from ..base._torch import as_plain_tensors
from .faces import own_grad, set_own_grad
from .flat_param import FlatParamHandle
from .layout_views import are_set_to, dense
from .leaf_classes import ORIGINAL, LeafClasses
from .param_refs import ParamRef, marks_of
from .sources import UnshardedParam
from .states import SHARDED, UNSHARDED, Left
from .write_tracker import VERSION


class ViewMode(enum.Enum):
    """The modes of a handle's leaves. [Note: view modes]"""

    SHARDED = "shard"
    UNSHARDED = "whole"
    FREED = "nothing"


SHOWS_SHARD, SHOWS_UNSHARDED, SHOWS_NOTHING = ViewMode

_FACTS = torch.Tensor.data_ptr, attrgetter("shape"), torch.Tensor.stride
_CLASS = repeat("__class__")


def change_classes(leaves: Sequence[nn.Parameter], classes: Mapping[type, Any]) -> None:
    """Give each of `leaves` the class that `classes` has for its class."""
    found = list(map(type, leaves))
    if found.count(found[0]) != len(found):
        for leaf, kind in zip(leaves, found, strict=True):
            leaf.__class__ = classes[kind]
    elif (changed := classes[found[0]]) is not found[0]:  # one lookup for all: nearly always one class
        for leaf in leaves:
            leaf.__class__ = changed


class TransformedLeaf(Protocol):
    """A leaf that modules see transformed: while it is unsharded, they hold something computed from it in its places.

    Attributes:
        leaf: its stored form.
    """

    leaf: nn.Parameter

    def install(self) -> None:
        """Let the modules hold the seen form. Precondition: the leaf is unsharded."""

    def uninstall(self, put: Callable[[ParamRef], None]) -> None:
        """Let `put` give each module the parameter that it holds at rest."""


class ParamViews:
    """The memory that one handle's leaves show, and changes that users made to the leaves meanwhile.

    Attributes:
        extended: those of the leaves that modules see transformed.
        tracks_writes: whether in-place writes to the `.data` of leaves are noticed.
        is_left_unsharded: whether a forward has left the leaves unsharded, in the shard itself, and no backward has
            reached them.
        left: what becomes of leaves that are unsharded.
        guarded: whether holders refuse to be used now.
        without_values: leaves whose places in the shard came from the meta device, and have no values yet.
        mode: [Note: view modes].
        give_back: makes users' parameters plain tensors of their own, when their unit is taken apart.
    """

    def __init__(self, handle: FlatParamHandle, classes: LeafClasses) -> None:
        self.handle = handle
        self.classes = classes
        private = bool(handle.face.private)
        self._hidden = classes.private_hidden if private else classes.hidden
        self._noticed = classes.private_noticed if private else classes.noticed
        self.extended: Sequence[TransformedLeaf] = []
        self.tracks_writes = self.is_left_unsharded = self.guarded = False
        self.left = Left.COMPUTING
        self.without_values: frozenset[int] = frozenset()
        self.mode = SHOWS_SHARD
        self._some_hidden = self._all_hidden = False  # leaves refuse to be used
        self._laid: UnshardedParam | None = None  # the one that leaves show
        self.note_classes()
        self._lay_out()
        self.give_back = classes.register(handle)

    def note_classes(self) -> None:
        """Record the classes of the leaves, which are plain now, and those that they have while they refuse to be
        used."""
        self._plain: list[type] = [ORIGINAL[type(leaf)] for leaf in self.handle.leaves]
        self._refusing: list[Any] = [self._hidden[kind] for kind in self._plain]

    def _lay_out(self) -> None:
        """Let users' parameters and the flat parameter show the shard, and leaves too if it is the unsharded parameter;
        else give these their shapes, dtype and device, without memory."""
        handle = self.handle
        for parameter, view in handle.at_rest.shown:
            parameter.data = view
        handle.flat_param.data = handle.shard
        self._laid = None
        if handle.shard_is_whole:
            for leaf, view in zip(handle.leaves, handle.at_rest.views, strict=True):
                if not view.is_meta:  # leaves are never on it
                    leaf.data = view
        else:
            empty = handle.at_rest.empty
            nothing = empty.new_full((), torch.nan if empty.is_floating_point() else 0)
            for leaf, spec in zip(handle.leaves, handle.layout.params, strict=True):
                leaf.data = nothing.expand(spec.shape)
            self._some_hidden = self._all_hidden = True
            change_classes(handle.leaves, self._hidden)

    def show(self, mode: ViewMode) -> None:
        """Let leaves and holders show `mode`. [Note: view modes]"""
        handle, before = self.handle, self.mode
        face = handle.face
        self.mode = mode
        self.left = Left.COMPUTING
        if mode is SHOWS_UNSHARDED:
            if self._some_hidden or self.tracks_writes:
                self._some_hidden = self._all_hidden = self.tracks_writes = False
                deque(map(setattr, handle.leaves, _CLASS, self._plain), 0)  # without a call for each
            if (now := handle.unsharded) is not self._laid:
                for leaf, view in now.shown:
                    leaf.data = view
                self._laid = now
            face.compute()
            return
        if not (self._all_hidden or handle.shard_is_whole):
            self._some_hidden, self._all_hidden, self.tracks_writes = True, True, False
            deque(map(setattr, handle.leaves, _CLASS, self._refusing), 0)
        if before is SHOWS_UNSHARDED:
            face.rest()
        if face.refusing and self.guarded is not (refuses := mode is SHOWS_NOTHING):
            self.guarded = refuses
            change_classes(face.refusing, self.classes.hidden if refuses else ORIGINAL)
            if self.classes.awaited and not refuses:
                self.classes.show_awaited(face.refusing)
        for each in self.extended:
            each.uninstall(face.put)

    def show_anew(self) -> None:
        """Point the leaves at the unsharded parameters when they show these next: users may have replaced their
        `.data`."""
        self._laid = None

    def hide(self, indices: Iterable[int]) -> None:
        """Let some leaves refuse to be used."""
        for i in indices:
            self.handle.leaves[i].__class__ = self._refusing[i]
        self._some_hidden = True

    def guard(self) -> None:
        """Let holders refuse to be used, if their face wants that, until the next `show` of the shard."""
        at_rest = self.mode is SHOWS_SHARD or self.left is Left.REQUESTED
        if at_rest and not self.guarded and (holders := self.handle.face.refusing):
            self.guarded = True
            change_classes(holders, self.classes.hidden)

    def track_writes(self, *, requested: bool = False, in_use: bool = False, ended: bool = False) -> None:
        """After a forward that left the leaves unsharded: detect writes to them, which would be lost when they are
        freed, including in-place writes to `.data`, which raise no version.

        Modules hold private leaves no longer then, unless a user has `requested` it, or modules of other units compute
        with them (`in_use`). After a backward that has `ended`, they hold the holders of any face.
        """
        if self.mode is not SHOWS_UNSHARDED:
            return
        face = self.handle.face
        if ended:
            face.rest()
        self.left = Left.SET_ASIDE if ended else face.after_forward(requested=requested, in_use=in_use)
        if self.handle.unsharded.buffer is None:
            self.is_left_unsharded = True  # in-place writes are kept, replacements are not
        else:
            change_classes(self.handle.leaves, self._noticed)
            self.tracks_writes = True
        if self.left is Left.SET_ASIDE:
            for each in self.extended:
                each.uninstall(face.put)

    def end_tracking(self) -> None:
        """End of `track_writes`: the unit computes with the leaves again."""
        self.tracks_writes, self.left = False, Left.COMPUTING
        deque(map(setattr, self.handle.leaves, _CLASS, self._plain), 0)
        self.handle.face.compute()

    @property
    def was_replaced(self) -> bool:
        """Whether leaves do not show the unsharded form: the user replaced their `.data`, maybe by another view of the
        same memory, or the objects that modules hold in their places. Only while unsharded."""
        if self.mode is not SHOWS_UNSHARDED or self._some_hidden:
            return False
        handle = self.handle
        leaves, views = handle.leaves, handle.unsharded.views
        with as_plain_tensors():
            # `is_set_to` is an operation of torch: modes would see it, and wrapper subclasses do not have it.
            alike = not (handle.unsharded.has_inner or modes_active()) and are_set_to(leaves, views)
            for fact in () if alike else _FACTS:
                if list(map(fact, leaves)) != list(map(fact, views)):
                    return True
        displaced = handle.face.displaced() if self.left is not Left.SET_ASIDE else None
        return bool(displaced and self.displaced)

    @property
    def replaced(self) -> list[str]:
        """The names of those leaves."""
        rows = enumerate(self.handle.unsharded.shown)
        with as_plain_tensors():
            found = {i for i, (leaf, view) in rows if any(fact(leaf) != fact(view) for fact in _FACTS)}
        if self.left is not Left.SET_ASIDE:  # else they are found at rest
            found |= self.displaced
        return [spec.name for i, spec in enumerate(self.handle.layout.params) if i in found]

    @property
    def displaced(self) -> set[int]:
        """The leaves in whose places users have put other objects while leaves are unsharded: of those that modules
        should hold themselves. In place of others they hold tensors made from them, and packed ones may get another
        parameter around their bytes."""
        displaced = self.handle.face.displaced()
        if not displaced:
            return displaced
        made = {id(each.leaf) for each in self.extended}
        return {i for i in displaced if not (self.handle.options.packed or id(self.handle.leaves[i]) in made)}

    def install_extended(self) -> None:
        """Let modules hold the seen forms of the leaves now: each pass has a graph of its own.

        Precondition: the leaves are unsharded.
        """
        for each in self.extended:
            each.install()

    def show_borrowed_views(self, views: list[torch.Tensor]) -> None:
        """Let users' parameters show `views`, which no handle owns, until `show_again`."""
        originals = self.handle.face.originals
        change_classes(originals, ORIGINAL)
        for parameter, view in zip(originals, views, strict=True):
            parameter.data = view
        self.mode = SHOWS_UNSHARDED

    def show_flat(self, flat: torch.Tensor) -> None:
        """Let the flat parameter show `flat`, 1-D and of any length, instead of the shard, or that again."""
        self.handle.flat_param.data = flat

    def show_again(self) -> None:
        """Point users' parameters and the flat parameter at the shard again."""
        self._some_hidden = self._all_hidden = self.tracks_writes = False
        self.left = Left.COMPUTING
        change_classes(self.handle.leaves, ORIGINAL)
        self._lay_out()
        self.mode = SHOWS_SHARD
        if self.guarded:
            change_classes(self.handle.face.refusing, self.classes.hidden)

    def replace_shard(self, shard: torch.Tensor) -> None:
        """Make `shard` (another dtype or device) the shard; gradients follow.

        Precondition: users see the shard.
        """
        handle = self.handle
        holders = handle.face.holders
        grads = [holder.grad for holder in holders]
        for holder in holders:
            holder.grad = None
        handle.replace_shard(shard)
        self.show_again()
        for holder, grad in zip(holders, grads, strict=True):
            if grad is not None:
                holder.grad = grad.to(device=shard.device, dtype=shard.dtype)

    def write_back(self, changed: Iterable[ParamRef], free: Callable[[FlatParamHandle], None]) -> bool:
        """Copy users' replacements for holders into the shard; True if there were any.

        These are a replaced `.data`, a parameter in one of the `changed` references, and a flat parameter whose
        `.data` was replaced. `free` frees a handle's unsharded parameters. Raises UsageError if shape or dtype does not
        fit. Precondition: users see the shard. [Note: assigned memory]
        """
        handle = self.handle
        # Before modules hold our parameters again.
        put = [(param_ref, param_ref.current) for param_ref in changed] if changed else []
        if found := not handle.flat_shows_shard:
            if handle.state is UNSHARDED:
                free(handle)
            self.adopt_flat()
        if handle.face.is_distributed:
            if (kept := handle.face.kept) is not None and kept.shows:
                kept.release()
            if replaced := handle.face.replaced():
                found = True
                holders = [handle.face.holder_of(i) for i in replaced]
                values = [handle.face.value_of(i, holder) for i, holder in zip(replaced, holders, strict=True)]
                words = [f"the value of the parameter {handle.layout.params[i].name!r}" for i in replaced]
                self._take_over(replaced, values, words, free)
                for i, holder in zip(replaced, holders, strict=True):
                    self._adopt(i, holder)
        replaced = handle.at_rest.replaced()
        if replaced:
            found = True
            shown = [parameter for parameter, _ in handle.at_rest.shown]
            dtypes = {each.dtype for each in shown}
            if len(replaced) == len(shown) and len(dtypes) == 1 and dtypes != {handle.shard.dtype}:
                raise UsageError(
                    f"the parameters of unit {handle.label} were converted from {handle.shard.dtype} to "
                    f"{dtypes.pop()} one by one after wrapping; call .to()/.half()/.double() on the "
                    "FullyShardedDataParallel module itself, or before wrapping"
                )
            words = [f"the .data of {handle.layout.params[i].name!r}" for i in replaced]
            self._take_over(replaced, [shown[i].detach() for i in replaced], words, free)
            for i in replaced:
                shown[i].data = handle.at_rest.views[i]
        taken = []
        for param_ref, held in put:
            index = next((i for i, leaf in enumerate(handle.leaves) if leaf is param_ref.leaf), None)
            if index is None or not isinstance(held, nn.Parameter):
                continue
            taken.append((param_ref, held, index, unaliased(handle.face.value_of(index, held), handle.shard)))
        for param_ref, held, index, value in taken:
            what = f"the parameter now registered as {param_ref.path!r}"
            self._store(index, value, what)
            self._adopt(index, held)
            param_ref.hold(param_ref.leaf)  # also in a recurrent module's list, which `put` may not update
            handle.face.put(param_ref)
            found = True
        return found

    def _take_over(
        self,
        indices: list[int],
        values: list[torch.Tensor],
        words: list[str],
        free: Callable[[FlatParamHandle], None],
    ) -> None:
        """Store the `values` of some leaves, whose `.data` users replaced, in a shard with memory of its own."""
        handle = self.handle
        for index, value, what in zip(indices, values, words, strict=True):
            self._check_stored(index, value, what)
        if not handle.shard.is_meta and handle.state in (SHARDED, UNSHARDED):
            if handle.state is UNSHARDED:
                free(handle)
            if handle.has_memory:
                self._move_shard(handle.shard)
            else:
                handle.drop_kept_source()
        for index, value, what in zip(indices, values, words, strict=True):
            self._store(index, value, what)

    def _move_shard(self, values: torch.Tensor) -> None:
        """Replace the shard by a copy of `values`.

        [Note: assigned memory] `kept = p.data; p.data = average; ...; p.data = kept` is how programs put weights aside:
        `kept` is a view of the shard, which a copy of `average` into it would overwrite. So values that come by
        assignment go to new memory, and `kept` stays as it is. The assigned tensor itself is not used: later changes of
        it have no effect.
        """
        self.handle.drop_kept_source()
        with torch.inference_mode(False):  # used in training, even if the next forward is in inference mode
            self.replace_shard(values.detach().to(self.handle.shard.device, copy=True))

    def _adopt(self, index: int, held: nn.Parameter) -> None:
        """Make a user's replacement for a holder the holder itself, if the handle's face allows it."""
        face, leaf = self.handle.face, self.handle.leaves[index]
        if vars(held) is not vars(leaf):
            vars(leaf).update(marks_of(held))
        if face.adopt(index, held):
            self.handle.writes.on_replacement()

    def abandon(self, index: int) -> None:
        """Stop training leaf `index`, which no module holds any more, and do not wait for its values."""
        handle = self.handle
        handle.face.holder_of(index).requires_grad_(False)
        view = handle.at_rest.views[index]
        if view.is_meta or index in self.without_values:
            self._store(index, torch.zeros(view.shape, dtype=view.dtype, device=handle.device), "an unused parameter")

    def adopt_flat(self) -> None:
        """Copy a user's replacement for the flat parameter's `.data` into the shard."""
        handle = self.handle
        flat = handle.flat_param
        if flat.shape != handle.shard.shape:
            raise UsageError(
                f"the flat parameter of unit {handle.label} was assigned data of shape {tuple(flat.shape)}; expected "
                f"this rank's shard, {tuple(handle.shard.shape)}"
            )
        if flat.dtype != handle.shard.dtype:
            self.replace_shard(flat.detach())
        elif handle.state is SHARDED:
            self._move_shard(flat)
        else:
            with torch.no_grad():
                handle.shard.copy_(flat.detach())
            flat.data = handle.shard

    def _store(self, index: int, value: torch.Tensor, what: str) -> None:
        handle = self.handle
        if handle.shard.is_meta:
            home = torch.device("cpu") if handle.options.offload else handle.device
            self.replace_shard(torch.zeros_like(handle.shard, device=home))
            self.without_values = frozenset(range(len(handle.leaves)))
        self.without_values -= {index}
        view = handle.at_rest.views[index]
        spec = handle.layout.params[index]
        self._check_stored(index, value, what)
        if not handle.has_memory:
            return  # the face keeps the value
        with torch.no_grad():
            if value.shape == view.shape:
                view.copy_(value)
                return
            for owned in handle.layout.owned(handle.rank):
                if owned.index == index:
                    # In the order of the parameter's memory, which may differ from the value's.
                    laid_out = value.contiguous() if spec.stride is None else _strided_like(value, spec.stride)
                    handle.shard[owned.in_shard.slice].copy_(dense(laid_out)[owned.in_param.slice])

    def _check_stored(self, index: int, value: torch.Tensor, what: str) -> None:
        """Refuse a `value` for leaf `index` that fits neither its place in the shard nor the whole parameter."""
        view, spec = self.handle.at_rest.views[index], self.handle.layout.params[index]
        if value.dtype != view.dtype:
            raise UsageError(f"{what} has dtype {value.dtype}; expected the shard's {view.dtype}")
        if value.shape != view.shape and tuple(value.shape) != spec.shape:
            raise UsageError(
                f"{what} was replaced by a tensor of shape {tuple(value.shape)}; expected this rank's shard of it, "
                f"{tuple(view.shape)}, or the full parameter, {spec.shape}. Inside summon_full_params(), parameters "
                "have their full shape"
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


def check_unwritten(views: ParamViews) -> None:
    """Refuse a change of parameters inside a forward: it would be lost with their unsharded memory."""
    handle = views.handle
    apart = handle.state is UNSHARDED and handle.unsharded.buffer is not None
    # As `was_edited`, whose call every unit would take.
    if apart and (list(map(VERSION, handle.leaves)) != handle.writes.known or views.was_replaced):
        try:
            refuse_writes(views, "inside a forward")
        finally:
            handle.face.take_back()  # else their values would be taken at rest


def keep_packed(views: ParamViews, param_refs: Iterable[ParamRef]) -> None:
    """After a forward: keep modules' changes to quantized weights, which are unsharded, valid. [Note: packed bytes]

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
                each.__class__ = views.classes.hidden[type(held)] if type(each) in ORIGINAL else type(held)
            vars(param_ref.leaf).update(vars(held))
            handle.face.put(param_ref)
            views.note_classes()


def check_exposed(views: ParamViews) -> None:
    """Refuse a change of parameters between forward and backward while they are kept unsharded."""
    handle = views.handle
    if handle.state is UNSHARDED:
        with as_plain_tensors():
            if handle.writes.is_stale or views.was_replaced:
                refuse_writes(views, "between forward and backward")


def check_places(views: ParamViews) -> None:
    """Refuse another forward, before the backward, where a user has given a module another parameter instead of a
    holder: its value is taken at rest, and until then its gradient would be lost."""
    if displaced := views.displaced:
        refuse_writes(views, "between forward and backward", displaced)


def check_left(views: ParamViews) -> None:
    """Refuse replacements for leaves that a forward has left, and that no backward has reached."""
    with as_plain_tensors():
        if views.tracks_writes or views.was_replaced:
            check_exposed(views)


def check_requested(views: ParamViews) -> None:
    """Refuse a change of parameters that a user unsharded, or of their gradients: it would be lost with that memory.

    Precondition: the leaves are unsharded.
    """
    handle = views.handle
    apart = handle.unsharded.buffer is not None
    if apart and handle.writes.was_edited:
        refuse_writes(views, "while they were unsharded by unshard()")
    rows = zip(handle.layout.params, handle.unsharded.shown, handle.at_rest.views, strict=True)
    for spec, (leaf, view), piece in rows:
        replaced = leaf.data_ptr() != view.data_ptr() or leaf.shape != view.shape or leaf.dtype != view.dtype
        grad = own_grad(leaf)
        if unsharded_grad := grad is not None and (apart or grad.shape != piece.shape):
            set_own_grad(leaf, None)  # its shape does not fit once the leaf shows its shard
        if replaced or unsharded_grad:
            views.show_anew()
            raise UsageError(
                f"parameter {spec.name!r} of unit {handle.label}: its {'.data' if replaced else '.grad'} was replaced "
                "while it was unsharded by unshard(). That memory is freed after its use, and the new value would be "
                "lost with it. Replace it while the parameter is sharded, or inside summon_full_params()"
            )


def refuse_writes(views: ParamViews, when: str, indices: Iterable[int] = ()) -> NoReturn:
    """`indices`: of the parameters, if that is known."""
    views.show_anew()
    handle = views.handle
    edited = [handle.layout.params[i].name for i in sorted(indices) or handle.writes.edited]
    changed = edited or views.replaced or _unlike_shard(handle) or ["this rank's shards"]
    raise UsageError(
        f"unit {handle.label}: parameters were written to {when}: {', '.join(changed)}. The backward would use "
        "different values than the forward, or the write would be lost; write to parameters before the forward or "
        "after the backward"
    )


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
