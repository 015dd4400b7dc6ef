"""Objects that are made once per process group, and dropped with it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

T = TypeVar("T")

_made: weakref.WeakKeyDictionary[Any, dict[Hashable, Any]] = weakref.WeakKeyDictionary()


def known_for_group(process_group: Any, key: Hashable, view: Callable[[Any], T]) -> T | None:
    """`view(found)` for the object that was made for `process_group` under `key`; None if there is none."""
    known = _made.get(process_group, {})
    return view(known[key]) if key in known else None


def for_group(
    process_group: Any, key: Hashable, make: Callable[[], T], *, usable: Callable[[T], bool] = lambda found: True
) -> T:
    """The object of `process_group` under `key`, made by `make` if there is none that is `usable`. It must not hold a
    reference to the group."""
    known = _made.setdefault(process_group, {})
    if key not in known or not usable(known[key]):
        known[key] = make()
    found: T = known[key]
    return found


def mark_as_made_for(process_group: Any, other: Any) -> None:
    """The same collectives use `process_group` and `other`, over the same ranks, each for some of them."""
    for_group(other, "made for", lambda: weakref.ref(process_group))


def first_of(process_group: Any) -> Any:
    """The group that `process_group` was made for; itself if it was not made for another one."""
    return known_for_group(process_group, "made for", lambda found: found()) or process_group


def forget_after(process_group: Any, other: Any) -> None:
    """Drop the objects of `other` when `process_group` is deleted, although torch keeps `other` until all groups are
    destroyed."""
    weakref.finalize(process_group, _forget, weakref.ref(other)).atexit = False


def _forget(reference: weakref.ref[Any]) -> None:
    if (group := reference()) is not None:
        _made.pop(group, None)
