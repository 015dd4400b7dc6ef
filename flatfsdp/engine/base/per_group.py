"""What is made once for a process group, and forgotten with it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

T = TypeVar("T")

_made: weakref.WeakKeyDictionary[Any, dict[Hashable, Any]] = weakref.WeakKeyDictionary()


def known_for_group(process_group: Any, key: Hashable, view: Callable[[Any], T]) -> T | None:
    """What `view` makes of that which was made for `process_group` under `key`; None if nothing was."""
    known = _made.get(process_group, {})
    return view(known[key]) if key in known else None


def for_group(
    process_group: Any, key: Hashable, make: Callable[[], T], *, usable: Callable[[T], bool] = lambda found: True
) -> T:
    """What `make` made for `process_group` under `key`; made again once it is not `usable`. It must not hold the
    group."""
    known = _made.setdefault(process_group, {})
    if key not in known or not usable(known[key]):
        known[key] = make()
    found: T = known[key]
    return found


def forget_after(process_group: Any, other: Any) -> None:
    """Forget what was made for `other` once `process_group` is gone, though torch knows `other` until all groups are
    destroyed."""
    weakref.finalize(process_group, _forget, weakref.ref(other)).atexit = False


def _forget(reference: weakref.ref[Any]) -> None:
    if (group := reference()) is not None:
        _made.pop(group, None)
