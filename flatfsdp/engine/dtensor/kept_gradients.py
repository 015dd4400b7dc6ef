"""Gradients of small parameters in DTensors that are made once.

[Note: kept gradients] To make a DTensor and to let it go takes longer than most of what else a step does to a small
parameter. So a handle whose parameters are small keeps the DTensors in which its gradients were shown, and lets them
show the next ones, which lie in memory of their own. It does so only where nobody else has any of these
DTensors: no variable, graph or weak reference, as their counts of references show; nobody hung an attribute on one; and
none requires a gradient. Else others are made. What was made of a DTensor (its local tensor, a view, a detached one)
counts for nothing: it has the old memory.

Memory of dropped gradients is given back where the next forward begins, or the backward if they were dropped after
that. That is why parameters must be small.
"""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Sequence
from itertools import repeat
from operator import attrgetter, is_
from typing import Any

import torch

from ..base import _dtensor, _torch

MOST = 4 * 1024  # bytes of a gradient, on average
# Without either, references would be missed.
_COUNTS = hasattr(torch.Tensor, "_use_count") and getattr(sys, "_is_gil_enabled", lambda: True)()

_SPEC, _LOCAL = attrgetter("_spec"), attrgetter("_local_tensor")
_GRAD = attrgetter("grad")


class KeptGradients:
    """The gradients of certain parameters of one handle.

    Attributes:
        indices: which parameters these are.
        shows: the DTensors have gradients, and their memory.
    """

    def __init__(self, indices: list[int], specs: Sequence[Any], like: torch.Tensor) -> None:
        """`specs`: of all parameters of the handle; `like`: a tensor of the dtype of the gradients, where these lie."""
        self.indices = indices
        self._is_permuted = indices != sorted(indices)
        self._specs = [specs[i] for i in indices]
        self._nothing, self._set_local = _dtensor.nothing_like(like), _dtensor.local_setter()
        self._made = _dtensor.dtensors([self._nothing] * len(indices), self._specs)
        self._attributes = list(map(vars, self._made))
        self.shows = False
        self._locals: Sequence[torch.Tensor] = ()
        self._alone = self._counts()

    @staticmethod
    def serve(total: torch.Tensor, parameters: int) -> bool:
        """Whether gradients are kept where `total` has those of so many `parameters`."""
        return type(total) is torch.Tensor and total.nbytes <= MOST * parameters and _COUNTS

    def _counts(self) -> tuple[list[int], list[int], list[int]]:
        """How many have each."""
        made = self._made
        return (
            list(map(sys.getrefcount, made)),
            list(map(_torch.use_count, made)),
            list(map(weakref.getweakrefcount, made)),
        )

    def release(self) -> bool:
        """Let go of the memory, if nobody else has any of the DTensors; whether that is so."""
        are_ours = self.shows and self._counts() == self._alone and not any(self._attributes)
        if (
            are_ours
            and not _torch.any_requires_grad(*self._made)
            and all(map(is_, map(_SPEC, self._made), self._specs))
        ):
            deque(map(self._set_local, self._made, repeat(self._nothing)), 0)
            self.shows, self._locals = False, ()
        return not self.shows

    def show(self, locals_: Sequence[torch.Tensor]) -> list[Any] | None:
        """The DTensors, which show `locals_` from now on, if nobody else has any of them."""
        if self.shows and not self.release():
            return None
        self.shows, self._locals = True, locals_
        deque(map(self._set_local, self._made, locals_), 0)
        return self._made

    def are_grads_of(self, holders: Sequence[torch.Tensor]) -> bool:
        """Whether they are the gradients of their parameters among `holders`, and show what they were to show last."""
        if len(holders) != len(self.indices) or self._is_permuted:
            holders = [holders[index] for index in self.indices]
        if not self.shows:
            return False
        with _torch.as_plain_tensors():
            are_gradients = all(map(is_, map(_GRAD, holders), self._made))
            return are_gradients and all(map(is_, map(_LOCAL, self._made), self._locals))
