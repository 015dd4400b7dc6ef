"""Lists of tensors that are given again and again, and known by which list it is."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import is_

import torch


class TensorGroup(list[torch.Tensor]):
    """A list that nobody changes once it is made: who is given it again need not look at each tensor."""

    __slots__ = ("__weakref__", "_joined")
    _joined: tuple[list[TensorGroup], TensorGroup]

    @staticmethod
    def join(groups: Sequence[TensorGroup]) -> TensorGroup:
        """The tensors of all, as one; the same where it was asked for the same groups last."""
        first, *rest = groups
        if not rest:
            return first
        known = getattr(first, "_joined", None)
        if known is None or len(known[0]) != len(rest) or not all(map(is_, known[0], rest)):
            known = first._joined = rest, TensorGroup(chain(*groups))
        return known[1]
