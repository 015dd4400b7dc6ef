"""Classes that parameters have for a time, as a value that a guard gives to units."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from .flat_param import FlatParamHandle


class _Originals(dict[type, type]):
    """Maps a temporary class to the class before; any other class to itself."""

    def __missing__(self, kind: type) -> type:
        return kind


ORIGINAL = _Originals()


@dataclass(frozen=True)
class LeafClasses:
    """The classes that parameters have for a time, by their own: the same objects, whose use a guard refuses or notices
    meanwhile. `PLAIN`: without a guard they keep their own, and a leaf without memory shows NaN in its shape.

    Attributes:
        hidden: of parameters that must not be used.
        noticed: of leaves outside of forwards and backwards, to which writes would be lost; also to their `.data`.
        private_hidden, private_noticed: of private leaves in their places. [Note: two lives]
        register: called once with the handle of such parameters; returns a function that leaves them as plain ones.
        awaited: the gradients that such parameters await; if there are any, `show_awaited` is called with holders that
            may be used again, since these may have had another class before.
    """

    hidden: Mapping[type, Any]
    noticed: Mapping[type, Any]
    private_hidden: Mapping[type, Any]
    private_noticed: Mapping[type, Any]
    register: Callable[[FlatParamHandle], Callable[[], object]]
    awaited: Collection[Any]
    show_awaited: Callable[[Sequence[nn.Parameter]], None]


PLAIN = LeafClasses(ORIGINAL, ORIGINAL, ORIGINAL, ORIGINAL, lambda handle: lambda: None, (), lambda holders: None)
