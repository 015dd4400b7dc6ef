"""Classes that are swapped in place: `FSDPLinear` for `Linear`, made once for each class.

A module keeps its identity, its attributes and its hooks, and is an instance of the class that it had. A class made
here comes first in the method resolution order, so that calls, moves and copies of the module go through `front`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from ..runtime.entries import PLAIN_CLASS

swapped: dict[type, type] = {}  # by the class that modules had

_initializes = True


def swap_class(module: nn.Module, front: type) -> None:
    """Give `module` a class that derives from `front` and from its present class."""
    plain = type(module)
    made = swapped.get(plain)
    if made is None:
        names = {PLAIN_CLASS: plain, "__module__": plain.__module__, "__doc__": plain.__doc__}
        made = swapped[plain] = type(f"FSDP{plain.__name__}", (front, plain), names)
    module.__class__ = made


def new_plain(cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of calling a swapped class: an unsharded instance of the original class."""
    plain: Any = getattr(cls, PLAIN_CLASS)
    made = plain.__new__(plain)
    if _initializes:
        made.__init__(*args, **kwargs)
    return made


@contextmanager
def new_does_not_init() -> Iterator[None]:
    """Inside, calling a swapped class makes an instance that is not initialized."""
    global _initializes
    before, _initializes = _initializes, False
    try:
        yield
    finally:
        _initializes = before
