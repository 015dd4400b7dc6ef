"""Private names of torch.func and of selective activation checkpoints, as `_torch.py` has those of torch, and functions
to leave and enter them.

[Note: transforms] Inside `torch.func.grad`, `vjp` and `jvp` each operation returns a wrapped tensor, which has no
storage, and other tensors must not be written. So the engine runs outside of all active transforms. The module's own
forward, and operations on users' tensors, run inside.

[Note: selective checkpoints] A selective checkpoint counts the operations of a forward and expects its recomputation to
have the same ones. The engine's differ: what is gathered or summed in a wait depends on what is in flight, and an error
in the middle of a sum ends all exchanges. So they run outside of it, too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch.utils import checkpoint

REASONS = {
    "_are_functorch_transforms_active": "nothing public shows whether a transform is active; every forward checks it",
    "_functorch.peek_interpreter_stack": "the innermost active transform; nothing public leads out of a transform",
    "_functorch.pop_dynamic_layer_stack": "leaves the innermost transform",
    "_functorch.push_dynamic_layer_stack": "enters it again",
    "_functorch.is_functorch_wrapped_tensor": "a tensor inside of transforms has a graph in each of them",
    "_functorch.get_unwrapped": "the tensor in the enclosing transform",
    "_len_torch_dispatch_stack": "the number of active dispatch modes, of which selective checkpoints are two",
    "_get_dispatch_stack_at": "an active mode; nothing public lists them",
    "_pop_torch_dispatch_stack": "leaves the innermost mode",
    "_push_on_torch_dispatch_stack": "enters it again, without what it does when it begins",
}
# The modes of a selective checkpoint in the forward and in the recomputation; nothing public distinguishes them.
_CHECKPOINTS = tuple(
    getattr(checkpoint, name)
    for name in ("_CachingTorchDispatchMode", "_CachedTorchDispatchMode")
    if hasattr(checkpoint, name)
)

T = TypeVar("T")


def missing() -> list[str]:
    """The names above that this torch does not have."""
    absent = []
    for name in REASONS:
        try:
            attrgetter(name)(torch._C)
        except AttributeError:
            absent.append(f"torch._C.{name}")
    return absent


# Whether the calling thread is inside a transform; torch's function itself, because every forward calls it.
in_transform: Callable[[], bool] = getattr(torch._C, "_are_functorch_transforms_active", lambda: False)


# The number of active dispatch modes, which intercept every operation; torch's function itself, for the same reason.
modes_active: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)


def in_checkpoint() -> bool:
    """Whether the calling thread is in a selective checkpoint. Checked only if any mode is active."""
    return any(isinstance(mode, _CHECKPOINTS) for mode in _modes())


class _Left(threading.local):
    """The transforms and modes that this thread has left in `outside`; None outside of that.

    Attributes:
        interpreters: those of transforms, the innermost first.
        modes: all modes that were active, the outermost first, if a selective checkpoint was one of them.
    """

    interpreters: list[Any] | None = None
    modes: list[Any] | None = None


left = _Left()


def _leave() -> list[Any]:
    found = []
    while torch._C._functorch.peek_interpreter_stack() is not None:
        found.append(torch._C._functorch.pop_dynamic_layer_stack())
    return found


def _enter(interpreters: list[Any]) -> None:
    for each in reversed(interpreters):
        torch._C._functorch.push_dynamic_layer_stack(each)


def _modes() -> list[Any]:
    return [torch._C._get_dispatch_stack_at(i) for i in range(modes_active())]


def _set_modes(modes: list[Any]) -> None:
    for _ in range(modes_active()):
        torch._C._pop_torch_dispatch_stack(None)
    for mode in modes:
        torch._C._push_on_torch_dispatch_stack(mode)


def _leave_modes() -> list[Any] | None:
    """Leave the selective checkpoints; returns all modes that were active if there were any, otherwise None."""
    modes = _modes()
    others = [mode for mode in modes if not isinstance(mode, _CHECKPOINTS)]
    if len(others) == len(modes):
        return None
    _set_modes(others)
    return modes


@contextmanager
def outside() -> Iterator[None]:
    """A context in which no transform and no selective checkpoint is active."""
    before, left.interpreters, left.modes = (left.interpreters, left.modes), _leave(), _leave_modes()
    try:
        yield
    finally:
        _enter(left.interpreters)
        if left.modes is not None:
            _set_modes(left.modes)
        left.interpreters, left.modes = before


def inside(operation: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
    """Return `operation(*args, **kwargs)`, run inside the transforms and checkpoints that `outside` has left."""
    interpreters, modes = left.interpreters, left.modes
    if not interpreters and modes is None:
        return operation(*args, **kwargs)
    left.interpreters = left.modes = None
    _enter(interpreters or [])
    if modes is not None:
        _set_modes(modes)
    try:
        return operation(*args, **kwargs)
    finally:
        left.interpreters, left.modes = _leave(), _leave_modes()


def levels_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """`tensor`, and the tensors that it wraps in the enclosing transforms, the innermost first; the last one is outside
    of all transforms. Each has a graph of its own."""
    found = [tensor]
    while torch._C._functorch.is_functorch_wrapped_tensor(found[-1]):
        found.append(torch._C._functorch.get_unwrapped(found[-1]))
    return found
