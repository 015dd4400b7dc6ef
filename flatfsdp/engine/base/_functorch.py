"""Private names of torch.func, as `_torch.py` has those of torch, and functions to leave and enter its transforms.

[Note: transforms] Inside `torch.func.grad`, `vjp` and `jvp` each operation returns a wrapped tensor, which has no
storage, and other tensors must not be written. So the engine runs outside of all active transforms. The module's own
forward, and operations on users' tensors, run inside.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, TypeVar

import torch

REASONS = {
    "_are_functorch_transforms_active": "nothing public shows whether a transform is active; every forward checks it",
    "_functorch.peek_interpreter_stack": "the innermost active transform; nothing public leads out of a transform",
    "_functorch.pop_dynamic_layer_stack": "leaves the innermost transform",
    "_functorch.push_dynamic_layer_stack": "enters it again",
    "_functorch.is_functorch_wrapped_tensor": "a tensor inside of transforms has a graph in each of them",
    "_functorch.get_unwrapped": "the tensor in the enclosing transform",
}

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


class _Left(threading.local):
    """The interpreters of the transforms that this thread has left, the innermost first; None outside of `outside`."""

    interpreters: list[Any] | None = None


left = _Left()


def _leave() -> list[Any]:
    found = []
    while torch._C._functorch.peek_interpreter_stack() is not None:
        found.append(torch._C._functorch.pop_dynamic_layer_stack())
    return found


def _enter(interpreters: list[Any]) -> None:
    for each in reversed(interpreters):
        torch._C._functorch.push_dynamic_layer_stack(each)


@contextmanager
def outside() -> Iterator[None]:
    """A context in which no transform is active."""
    before, left.interpreters = left.interpreters, _leave()
    try:
        yield
    finally:
        _enter(left.interpreters)
        left.interpreters = before


def inside(operation: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
    """Return `operation(*args, **kwargs)`, run inside the transforms that `outside` has left, if any."""
    if not left.interpreters:
        return operation(*args, **kwargs)
    interpreters, left.interpreters = left.interpreters, None
    _enter(interpreters)
    try:
        return operation(*args, **kwargs)
    finally:
        left.interpreters = _leave()


def levels_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """`tensor`, and the tensors that it wraps in the enclosing transforms, the innermost first; the last one is outside
    of all transforms. Each has a graph of its own."""
    found = [tensor]
    while torch._C._functorch.is_functorch_wrapped_tensor(found[-1]):
        found.append(torch._C._functorch.get_unwrapped(found[-1]))
    return found
