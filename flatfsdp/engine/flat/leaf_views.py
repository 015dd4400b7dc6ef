"""The memory that private leaves show, and the times when holders refuse to be used. [Note: two lives]

A leaf has the shape of its parameter at any time, and shows the unsharded buffer, whose storage comes and goes. While
that has no memory, the leaf refuses to be used. Holders refuse it from the begin of a forward to the end of the
backward ([Note: guarded parameters]).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import repeat
from typing import Any

import torch

from .deferred_grad import ARRIVALS, show_deferred
from .flat_param import FlatParamHandle
from .param_guard import HIDDEN, NOTICED, ORIGINAL, change_classes, may_hide
from .sources import UnshardedParam
from .views import SHOWS_SHAPE, SHOWS_SHARD, SHOWS_UNSHARDED, ParamViews, ViewMode

_CLASS = repeat("__class__")


class LeafViews(ParamViews):
    """`ParamViews` of private leaves."""

    def __init__(self, handle: FlatParamHandle) -> None:
        self.handle = handle
        self.extended = []
        self.some_hidden = self.tracks_writes = self.is_left_unsharded = False
        self.without_values = frozenset()
        self.mode = SHOWS_SHARD
        self._guarded = self._all_hidden = False
        self._laid: UnshardedParam | None = None  # the one that leaves show
        self.note_classes()
        self._lay_out_nothing()
        may_hide(handle)

    def note_classes(self) -> None:
        """Record the classes of the leaves, which are plain now, and those that they have while they refuse to be
        used."""
        self._plain: list[type] = [ORIGINAL[type(leaf)] for leaf in self.handle.leaves]
        self._refusing: list[Any] = [HIDDEN[kind] for kind in self._plain]

    def _lay_out_nothing(self) -> None:
        """Give the leaves their shapes, dtype and device, without memory."""
        for leaf, view in self._shapes():
            leaf.data = view
        self._laid = None
        self.some_hidden, self._all_hidden, self.tracks_writes = True, True, False
        deque(map(setattr, self.handle.leaves, _CLASS, self._refusing), 0)

    def show(self, mode: ViewMode) -> None:
        before, face = self.mode, self.handle.face
        self.mode = mode
        if mode is SHOWS_UNSHARDED:
            if self.some_hidden or self.tracks_writes:
                self.some_hidden = self._all_hidden = self.tracks_writes = False
                deque(map(setattr, self.handle.leaves, _CLASS, self._plain), 0)  # without a call for each
            if (now := self.handle.unsharded) is not self._laid:
                for leaf, view in now.shown:
                    leaf.data = view
                self._laid = now
            face.compute()
        elif mode is SHOWS_SHAPE:
            self.some_hidden = self._all_hidden = False
            deque(map(setattr, self.handle.leaves, _CLASS, self._plain), 0)
        else:
            if not self._all_hidden:
                self.some_hidden, self._all_hidden, self.tracks_writes = True, True, False
                deque(map(setattr, self.handle.leaves, _CLASS, self._refusing), 0)
            if before is SHOWS_UNSHARDED:
                face.rest()
            if mode is not SHOWS_SHARD:
                if not self._guarded:
                    self._guarded = True
                    change_classes(face.holders, HIDDEN)
            elif self._guarded:
                self._guarded = False
                change_classes(face.holders, ORIGINAL)
                if ARRIVALS:
                    show_deferred(face.holders)
        if self.extended and mode is not SHOWS_UNSHARDED:
            for each in self.extended:
                each.uninstall(face.put)

    def guard(self) -> None:
        if self.mode is SHOWS_SHARD and not self._guarded:
            self._guarded = True
            change_classes(self.handle.face.holders, HIDDEN)

    def hide(self, indices: Iterable[int]) -> None:
        for i in indices:
            self.handle.leaves[i].__class__ = self._refusing[i]
        self.some_hidden = True

    def track_writes(self, *, described_as_unsharded: bool = False, in_use: bool = False) -> None:
        if self.mode is not SHOWS_UNSHARDED:
            return
        if self.handle.unsharded.buffer is None:
            self.is_left_unsharded = True
        else:
            change_classes(self.handle.leaves, NOTICED)
        self.tracks_writes = True
        if not (described_as_unsharded or in_use):
            self.handle.face.rest()

    def unhide(self) -> None:
        self.some_hidden = self._all_hidden = self.tracks_writes = False
        deque(map(setattr, self.handle.leaves, _CLASS, self._plain), 0)
        if self.mode is SHOWS_UNSHARDED:
            self.handle.face.compute()

    def used_at_rest(self) -> list[str]:
        return []  # graphs over holders fit their gradients

    def show_borrowed_views(self, views: list[torch.Tensor]) -> None:
        for holder, view in zip(self.handle.face.holders, views, strict=True):
            holder.data = view
        self.mode = SHOWS_UNSHARDED

    def end_borrowed_views(self) -> None:
        for holder, view in self.handle.at_rest.shown:
            holder.data = view
        self.mode = SHOWS_SHARD

    def show_again(self) -> None:
        deque(map(setattr, self.handle.leaves, _CLASS, self._plain), 0)
        self._lay_out_nothing()
        self.mode = SHOWS_SHARD


def views_of(handle: FlatParamHandle) -> ParamViews:
    """The views of the leaves of `handle`."""
    return LeafViews(handle) if handle.face.two_lives else ParamViews(handle)
