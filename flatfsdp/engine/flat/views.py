"""The memory that leaves and users' parameters show. Only this file assigns a parameter's `.data` (a test looks);
other files only pass on what users assign.

[Note: view modes] A leaf has the shape of its parameter at any time, and shows the unsharded buffer, whose storage
comes and goes. A handle's leaves show the *unsharded* parameters, or *nothing*. They show nothing at rest, where users
meet holders that show the *shard*, and between a forward that resharded and the backward. If the shard itself is the
unsharded parameter, leaves always show it. A guard may refuse the use of leaves that show nothing, and of holders from
the beginning of a forward to the end of its backward: it has another class for them (`Guard`).
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import torch
from torch import nn

from .flat_param import FlatParamHandle
from .guard import ORIGINAL, Guard
from .param_refs import ParamRef
from .sources import UnshardedParam
from .states import Left


class ViewMode(enum.Enum):
    """The modes of a handle's leaves. [Note: view modes]"""

    SHARDED = "shard"
    UNSHARDED = "whole"
    FREED = "nothing"


SHOWS_SHARD, SHOWS_UNSHARDED, SHOWS_NOTHING = ViewMode

_CLASS = repeat("__class__")


def change_classes(leaves: Sequence[nn.Parameter], classes: Mapping[type, Any]) -> None:
    """Give each of `leaves` the class that `classes` has for its class."""
    found = list(map(type, leaves))
    if found.count(found[0]) != len(found):
        for leaf, cls in zip(leaves, found, strict=True):
            leaf.__class__ = classes[cls]
    elif (changed := classes[found[0]]) is not found[0]:  # one lookup for all: nearly always one class
        for leaf in leaves:
            leaf.__class__ = changed


@dataclass(eq=False)
class TransformedLeaf:
    """A leaf that modules see transformed: while it is unsharded, they hold something computed from it in its places.

    Attributes:
        leaf: its stored form.
        param_refs: its places.
        see: computes the seen form, from the unsharded leaf.
    """

    leaf: nn.Parameter
    param_refs: list[ParamRef]
    see: Callable[[nn.Parameter], torch.Tensor]


class ParamViews:
    """The memory that one handle's leaves show, and writes of users to it.

    Attributes:
        extended: those of the leaves that modules see transformed.
        guard: refuses uses and writes.
        some_hidden: whether leaves refuse to be used.
        tracks_writes: whether in-place writes to the `.data` of leaves are noticed.
        left: what becomes of leaves that are unsharded.
        guarded: whether holders refuse to be used now.
        mode: [Note: view modes].
        give_back: makes users' parameters plain tensors of their own, when their unit is taken apart.
    """

    def __init__(self, handle: FlatParamHandle, guard: Guard) -> None:
        self.handle = handle
        self.guard = guard
        private = handle.face.leaves_are_private
        self._hidden = guard.private_hidden if private else guard.hidden
        self._noticed = guard.private_noticed if private else guard.noticed
        self.extended: Sequence[TransformedLeaf] = []
        self.tracks_writes = self.guarded = False
        self.left = Left.COMPUTING
        self.mode = SHOWS_SHARD
        self.some_hidden = self._all_hidden = False
        self._laid: UnshardedParam | None = None  # the one that leaves show
        self.note_classes()
        self._lay_out()
        self.give_back = guard.register(handle)

    def note_classes(self) -> None:
        """Record the classes of the leaves, which are plain now, and those that they have while they refuse to be
        used."""
        self._plain: list[type] = [ORIGINAL[type(leaf)] for leaf in self.handle.leaves]
        self._refusing: list[Any] = [self._hidden[cls] for cls in self._plain]

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
            self.some_hidden = self._all_hidden = True
            change_classes(handle.leaves, self._hidden)

    def show(self, mode: ViewMode) -> None:
        """Let leaves and holders show `mode`. [Note: view modes]"""
        handle, before = self.handle, self.mode
        face = handle.face
        self.mode = mode
        self.left = Left.COMPUTING
        if mode is SHOWS_UNSHARDED:
            if self.some_hidden or self.tracks_writes:
                self.some_hidden = self._all_hidden = self.tracks_writes = False
                deque(map(setattr, handle.leaves, _CLASS, self._plain), 0)  # without a call for each
            if (now := handle.unsharded) is not self._laid:
                for leaf, view in now.shown:
                    leaf.data = view
                self._laid = now
            face.compute()
            return
        if not (self._all_hidden or handle.shard_is_whole):
            self.some_hidden, self._all_hidden, self.tracks_writes = True, True, False
            deque(map(setattr, handle.leaves, _CLASS, self._refusing), 0)
        if before is SHOWS_UNSHARDED:
            face.rest()
        if face.holders_refuse and self.guarded is not (refuses := mode is SHOWS_NOTHING):
            self.guarded = refuses
            change_classes(face.holders, self.guard.hidden if refuses else ORIGINAL)
            if self.guard.awaited and not refuses:
                self.guard.show_awaited(face.holders)
        if self.extended:
            self._put_extended()

    def _put_extended(self) -> None:
        for param_ref in [param_ref for each in self.extended for param_ref in each.param_refs]:
            self.handle.face.put(param_ref)

    def show_anew(self) -> None:
        """Point the leaves at the unsharded parameters when they show these next: users may have replaced their
        `.data`."""
        self._laid = None

    def hide(self, indices: Iterable[int]) -> None:
        """Let some leaves refuse to be used."""
        for i in indices:
            self.handle.leaves[i].__class__ = self._refusing[i]
        self.some_hidden = True

    def refuse_holders(self) -> None:
        """Let holders refuse to be used, if their face wants that, until the next `show` of the shard."""
        at_rest = self.mode is SHOWS_SHARD or self.left is Left.REQUESTED
        if at_rest and not self.guarded and self.handle.face.holders_refuse:
            self.guarded = True
            change_classes(self.handle.face.holders, self.guard.hidden)

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
        if self.handle.unsharded.buffer is not None:  # else in-place writes are kept
            change_classes(self.handle.leaves, self._noticed)
            self.tracks_writes = True
        if self.extended and self.left is Left.SET_ASIDE:
            self._put_extended()

    def end_tracking(self) -> None:
        """End of `track_writes`: the unit computes with the leaves again."""
        if self.tracks_writes:
            self.tracks_writes = False
            deque(map(setattr, self.handle.leaves, _CLASS, self._plain), 0)
        self.left = Left.COMPUTING
        self.handle.face.compute()

    def install_extended(self) -> None:
        """Let modules hold the seen forms of the leaves now: each pass has a graph of its own.

        Precondition: the leaves are unsharded.
        """
        for each in self.extended:
            value = each.see(each.leaf)
            for param_ref in each.param_refs:
                param_ref.assign(value)

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
        self.some_hidden = self._all_hidden = self.tracks_writes = False
        self.left = Left.COMPUTING
        change_classes(self.handle.leaves, ORIGINAL)
        self._lay_out()
        self.mode = SHOWS_SHARD
        if self.guarded:
            change_classes(self.handle.face.holders, self.guard.hidden)

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
