"""Gradients of small parameters in DTensors that are made once.

[Note: kept gradients] To make and destroy a DTensor and its local tensor takes longer than most other work of a step on
a small parameter. So a handle whose parameters are small keeps the DTensors in which its gradients are shown, and their
local tensors, which are views of one storage. The next gradients are copied there, unless other code still has a
reference to any of these (a variable, a graph, a weak reference of a DTensor, a view of the memory), as counts of
references show; or has set an attribute on one, made one require a gradient, or transposed or reshaped one in
place. In these cases new ones are made.

Memory of dropped gradients is given back where the next forward begins, or the backward if they were dropped after
that. Therefore parameters must be small.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from operator import attrgetter, is_
from typing import Any

import torch

from ..base import _dtensor, _torch

MOST = 4 * 1024  # bytes of a gradient, on average
# Without both, references would be missed.
_COUNTS = hasattr(torch.Tensor, "_use_count") and getattr(sys, "_is_gil_enabled", lambda: True)()

_SPEC, _LOCAL, _SHAPE = attrgetter("_spec"), attrgetter("_local_tensor"), attrgetter("shape")
_STRIDE = torch.Tensor.stride

Split = tuple[list[int], list[torch.Tensor]]


class KeptGradients:
    """The gradients of certain parameters of one handle.

    Attributes:
        trained: these parameters; indices: in the order of the DTensors.
        is_whole: whether these are all parameters, in order.
        shows: whether the DTensors have gradients, and memory.
    """

    def __init__(
        self, trained: frozenset[int], specs: Sequence[Any], like: torch.Tensor, split: Callable[[torch.Tensor], Split]
    ) -> None:
        """`specs`: of all parameters of the handle; `like`: the reduced tensor of all of them; `split`: returns the
        indices of parameters with elements in such a tensor, and those of each, as a view."""
        self.trained, self.shows = trained, False
        with torch.inference_mode(False):
            self._flat = torch.empty_like(like)
        self.indices, self._locals = split(self._flat)
        self.is_whole = self.indices == [*range(len(specs))]
        self._specs = [specs[i] for i in self.indices]
        self._made = _dtensor.dtensors(self._locals, self._specs)
        self._attributes = list(map(vars, self._made))
        self._storage, self._bytes = self._flat.untyped_storage(), like.nbytes
        self._storage.resize_(0)
        self._address = 0
        self._deep = [each for each in self._locals if each.dim() > 1]
        self._alone = self._facts()

    @staticmethod
    def serve(total: torch.Tensor, parameters: int) -> bool:
        """Whether to keep gradients like `total`, which holds those of `parameters` parameters."""
        return type(total) is torch.Tensor and total.nbytes <= MOST * parameters and _COUNTS

    def _facts(self) -> tuple[Any, ...]:
        """The counts of references, and the attributes of local tensors that change in place without a write."""
        made, tensors = self._made, self._locals
        return (
            _torch.storage_uses(self._storage._cdata),
            sys.getrefcount(self._storage),
            list(map(sys.getrefcount, made)),
            list(map(_torch.use_count, made)),
            list(map(weakref.getweakrefcount, made)),
            list(map(sys.getrefcount, tensors)),
            list(map(_torch.use_count, tensors)),
            list(map(_SHAPE, tensors)),
            list(map(_STRIDE, self._deep)),
        )

    def release(self) -> bool:
        """Release the memory, if no other code has a reference to it or has changed attributes of the next gradients;
        returns whether it is released."""
        if (
            self.shows
            and self._facts() == self._alone
            and self._storage.resizable()
            and self._storage.data_ptr() == self._address
            and not any(self._attributes)
            and not _torch.any_requires_grad(*self._made, *self._locals)
            and all(map(is_, map(_SPEC, self._made), self._specs))
            and all(map(is_, map(_LOCAL, self._made), self._locals))
        ):
            self._storage.resize_(0)
            self.shows = False
        return not self.shows

    def show(self, total: torch.Tensor) -> list[Any] | None:
        """The DTensors, which show the values of `total` from now on; None if other code has a reference to them."""
        if self.shows and not self.release():
            return None
        self._storage.resize_(self._bytes)
        self._address = self._storage.data_ptr()  # changes if a program moves it to shared memory
        self._flat.copy_(total)
        self.shows = True
        return self._made
