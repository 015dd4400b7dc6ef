"""State dicts for whoever is done with them before anybody steps.

[Note: lent values] A checkpoint that is written at once needs no copies. Inside `sharing_memory()`, what this rank owns
of parameters, and of an optimizer's states, is shown where it lies; whole values are gathered, and copies as ever.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_shares_memory: ContextVar[bool] = ContextVar("values of state dicts are lent", default=False)


@contextmanager
def sharing_memory() -> Iterator[None]:
    """Inside, values of sharded state dicts share memory with what they are of. [Note: lent values]"""
    token = _shares_memory.set(True)
    try:
        yield
    finally:
        _shares_memory.reset(token)


def shares_memory() -> bool:
    """Whether the caller is inside `sharing_memory()`."""
    return _shares_memory.get()
