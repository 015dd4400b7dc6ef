"""The gradients of a window, shown as `.grad`, so that what a program does with these applies to the window.

[Note: marks] Under no_sync the gradients live in a buffer that no user sees. A parameter without `.grad` is given this
rank's slice of it. If user code sets a parameter's `.grad` to None or zero, or replaces it, the next backward drops
that parameter's gradients from the window. Other edits are refused: of a gradient that was synchronized before, too,
which is a part of the sum like the window. If user code still holds such a slice by then, the slice keeps its values,
and the window continues in other memory. Versions show writes. torch raises none for writes to a tensor's `.data`, and
for a new `.data`, nor for writes to a list of DTensors, as by `zero_grad(set_to_none=False)` of an optimizer with
`foreach` or `fused`; so gradients that are shown have a class that does.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
import types
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import UsageError
from ..base import _torch
from ..base._dtensor import is_dtensor, local_of
from ..flat.faces import assign_grad
from ..flat.flat_param import FlatParamHandle
from ..flat.gradient_slots import GradientSlots, Marks
from ..runtime.model import Model
from ..runtime.unit import Unit


def attach_marks(unit: Unit) -> None:
    """Show the windows of `unit`, which is new."""
    for grads in unit.grads:
        grads.marks = WindowMarks(grads.handle)


def open_windows(model: Model) -> list[WindowMarks]:
    """The marks of sums of microbatches without synchronization in `model`, which are of this rank's data alone."""
    return [
        grads.marks
        for unit in model.units
        for grads in unit.grads
        if grads.accumulation.window_open and not grads.handle.is_unsharded_at_rest
        if isinstance(grads.marks, WindowMarks)
    ]


class CountsWrites:
    """Mixed into the class of a shown gradient: its version also counts writes to its `.data`, and new ones.
    [Note: marks]"""

    before: type[torch.Tensor]  # the class without this

    @property
    def data(self) -> torch.Tensor:
        return _tensor(self).detach()  # which shares the version

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        held = _local(self).detach()
        self.before.data.__set__(self, value)  # type: ignore[attr-defined]
        if _place(_local(self)) != _place(held):
            with _torch.as_plain_tensors():
                torch.autograd.graph.increment_version([_tensor(self)])

    # Copies are of the class without this.

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        with _as_before(self):
            return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        with _as_before(self):
            return self.__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        with _as_before(self):
            return repr(self)


class CountsListWrites(CountsWrites):
    """The same of a DTensor: also counts writes to a list that it is in."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        with _torch.as_plain_tensors():
            result = func(*args, **(kwargs or {}))
            if func.__name__.endswith("_") and args and isinstance(args[0], (list, tuple)):
                ours = [_tensor(each) for each in args[0] if isinstance(each, CountsListWrites)]
                torch.autograd.graph.increment_version(ours)
        return result


class _PlainInWindow(CountsWrites, torch.Tensor):  # type: ignore[misc]  # of the signatures of `__repr__`
    """A tensor in a window; what is computed from it is plain."""

    __torch_function__ = torch.nn.Parameter.__torch_function__
    before = torch.Tensor


@contextlib.contextmanager
def _as_before(grad: Any) -> Iterator[None]:
    """Inside, a shown gradient has the class that it had before."""
    cls = type(grad)
    grad.__class__ = cls.before
    try:
        yield
    finally:
        grad.__class__ = cls


def _tensor(value: Any) -> torch.Tensor:
    return value


def _local(grad: Any) -> torch.Tensor:
    """This rank's part of it."""
    return local_of(grad) if is_dtensor(grad) else grad


def _place(local: torch.Tensor) -> tuple[Any, ...]:
    """A value that changes with other memory, also without elements, or with another layout."""
    return local.untyped_storage()._cdata, local.storage_offset(), local.dtype, local.shape, local.stride()


@functools.cache
def _counting(cls: type) -> type:
    """The class for gradients of class `cls` in a window."""
    if cls is torch.Tensor:
        return _PlainInWindow
    return types.new_class(
        f"{cls.__name__}InWindow", (CountsListWrites, cls), {}, lambda names: names.update(before=cls)
    )


@dataclass(frozen=True, eq=False)
class WindowGrad:
    """The `.grad` of a parameter as a window left it, and the indices of its slots."""

    parameter: torch.Tensor
    grad: torch.Tensor
    versions: tuple[int, int]  # its own, and that of the local part
    indices: tuple[int, ...]
    is_ours: bool  # made by the window, and not the sum of earlier synchronized gradients

    @property
    def is_there(self) -> bool:
        """Whether the parameter still has it."""
        return self.parameter.grad is self.grad

    @property
    def local(self) -> torch.Tensor:
        """This rank's part of it, which an assignment to the `.data` of a DTensor replaces."""
        return _local(self.grad)

    @property
    def was_changed(self) -> bool:
        """Whether it was written to, or its memory replaced."""
        return (self.grad._version, self.local._version) != self.versions


class WindowMarks(Marks):
    """The marks of one handle's window."""

    def __init__(self, handle: FlatParamHandle) -> None:
        self._handle = handle
        self._grads: list[WindowGrad] = []
        self._alone: tuple[float, ...] | None = None  # the users of the memory before it was shown, if it was

    def is_stepped_by(self, held: Container[int]) -> bool:
        """Whether an optimizer with these parameters, by their ids, would step on gradients that a window left."""
        return any(mark.is_there and id(mark.parameter) in held for mark in self._grads)

    def show(self, slots: GradientSlots, awaited: frozenset[int]) -> None:
        """Show this rank's piece of each gradient of the window in `slots` as its `.grad`."""
        if slots.buffer is None:
            return
        handle, self._alone = self._handle, _users(slots.buffer.tensor)
        for parameter, piece, indices in handle.face.window_pieces(slots.buffer.tensor, awaited):
            grad = parameter.grad
            if is_ours := grad is None:
                # `.data` has a version counter of its own: editing one mark does not change its neighbors' versions.
                own = piece.data.to(device=handle.shard.device, dtype=handle.precision.grad)
                grad = handle.face.like_holder(indices, own)
                assign_grad(parameter, grad)
            assert grad is not None
            versions = grad._version, _local(grad)._version
            self._grads.append(WindowGrad(parameter, grad, versions, indices, is_ours))
            if type(grad) is torch.Tensor or (is_dtensor(grad) and not isinstance(grad, CountsWrites)):
                grad.__class__ = _counting(type(grad))

    def take_back(self, slots: GradientSlots) -> bool:
        """Drop from the window in `slots` the gradients that the user dropped; remove the marks that the window made.
        False if no gradient is left in it."""
        marks = self._forget()
        changed = [mark for mark in marks if mark.is_there and mark.was_changed]
        edited = [mark for mark in changed if mark.local.any()]
        if edited:
            names = ", ".join(self._handle.layout.params[i].name for mark in edited for i in mark.indices)
            raise UsageError(
                f"unit {self._handle.label}: the .grad of {names} was edited after a backward under "
                "no_sync(). Until gradients are synchronized, .grad shows only a part of the accumulated gradients; "
                "edit it after a backward outside of no_sync() that computed gradients, or drop it with zero_grad()"
            )
        # An empty piece looks zero after any edit; its neighbors show it.
        zeroed = [mark for mark in changed if mark not in edited and (mark.local.numel() or not edited)]
        dropped = [mark for mark in marks if mark in zeroed or not mark.is_there]
        for mark in marks:
            if mark.is_ours and mark.is_there:
                mark.parameter.grad = None
        for mark in dropped:
            slots.filled.difference_update(mark.indices)
        if marks and len(dropped) == len(marks):
            return False
        if (shown := self._leave_held(slots)) is not None:
            slots.open().tensor.copy_(shown)
        return True

    def end(self, slots: GradientSlots) -> None:
        """The window in `slots` is dropped."""
        self._forget()
        self._leave_held(slots)

    def _forget(self) -> list[WindowGrad]:
        marks, self._grads = self._grads, []
        for mark in marks:
            if isinstance(mark.grad, CountsWrites):
                mark.grad.__class__ = mark.grad.before
        return marks

    def _leave_held(self, slots: GradientSlots) -> torch.Tensor | None:
        """Leave the memory of `slots` to user code, if that still holds part of what was shown."""
        alone, self._alone = self._alone, None
        if slots.buffer is None or alone in (None, _users(slots.buffer.tensor)):
            return None
        return slots.disown()


def _users(tensor: torch.Tensor) -> tuple[float, ...]:
    """The reference counts of the storage, whether it is resizable, and its address: a value that changes when other
    code gets a reference to the memory."""
    if type(tensor) is not torch.Tensor:  # in a dry run
        return ()
    storage = tensor.untyped_storage()
    return _torch.storage_uses(storage._cdata), sys.getrefcount(storage), storage.resizable(), storage.data_ptr()
