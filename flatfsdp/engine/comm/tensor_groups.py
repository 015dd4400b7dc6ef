"""Lists of tensors that are passed repeatedly, and are recognized by the identity of the list."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import is_

import torch


class TensorGroup(list[torch.Tensor]):
    """A list that is never changed after its creation: the same list means the same tensors."""

    __slots__ = ("__weakref__", "_joined")
    _joined: tuple[list[TensorGroup], TensorGroup]

    @staticmethod
    def join(groups: Sequence[TensorGroup]) -> TensorGroup:
        """The tensors of all `groups` in one group; the same object as in the last call if `groups` are the same."""
        first, *others = groups
        if not others:
            return first
        known = getattr(first, "_joined", None)
        if known is None or len(known[0]) != len(others) or not all(map(is_, known[0], others)):
            known = first._joined = others, TensorGroup(chain(*groups))
        return known[1]
