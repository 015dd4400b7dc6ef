"""Process-wide values that can be replaced inside a context: for dry runs, and for test doubles."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Override(Generic[T]):
    """A value, which `being(other)` replaces inside a context."""

    def __init__(self, value: T) -> None:
        self.value = value

    @contextmanager
    def being(self, value: T) -> Iterator[None]:
        """A context in which the value is replaced by this `value`."""
        before, self.value = self.value, value
        try:
            yield
        finally:
            self.value = before


without_memory: Override[Any] = Override(None)  # of a dry run: torch's mode in which tensors have no memory


def is_memoryless() -> bool:
    """Whether new tensors have neither memory nor values: in a dry run."""
    return without_memory.value is not None
