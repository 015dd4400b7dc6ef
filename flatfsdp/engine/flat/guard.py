"""The guard of the parameters of a unit against uses and writes that would go wrong: a strategy, given to units."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch import nn

from .flat_param import FlatParamHandle


class _Originals(dict[type, type]):
    """Maps a temporary class to the class before; any other class to itself."""

    def __missing__(self, cls: type) -> type:
        return cls


ORIGINAL = _Originals()


class Guard:
    """Gives parameters another class for a time, the same objects, whose use it refuses or notices meanwhile; and looks
    for writes to unsharded parameters. This one does neither: parameters keep their classes, and a leaf without memory
    shows NaN in its shape.

    Attributes:
        hidden: by class, that of parameters that must not be used.
        noticed: that of leaves outside of forwards and backwards, to which writes would be lost; also to their `.data`.
        private_hidden, private_noticed: the same of private leaves. [Note: two lives]
        awaited: the gradients that such parameters await; if there are any, `show_awaited` is called with holders that
            may be used again, since these may have had another class before.
    """

    hidden: Mapping[type, Any] = ORIGINAL
    noticed: Mapping[type, Any] = ORIGINAL
    private_hidden: Mapping[type, Any] = ORIGINAL
    private_noticed: Mapping[type, Any] = ORIGINAL
    awaited: Collection[Any] = ()

    def register(self, handle: FlatParamHandle) -> Callable[[], object]:
        """Called once with the handle of parameters; returns a function that leaves them as plain ones."""
        return lambda: None

    def show_awaited(self, holders: Sequence[nn.Parameter]) -> None:
        """Let `holders` have the classes of those that await gradients."""

    def check_computed(self, unit: Any) -> None:
        """A forward has computed with the parameters of `unit`; raises if writes to them would be lost."""

    def check_used(self, unit: Any) -> None:
        """A backward is about to compute with the parameters of `unit`; raises for writes to unsharded ones since they
        were last used."""

    def check_left(self, unit: Any) -> None:
        """Parameters of `unit` that a forward has left, and that no backward has reached, may be freed; raises if
        writes to them would be lost."""

    def end_request(self, unit: Any, *, written: bool) -> None:
        """A user unsharded `unit` between iterations: raises if writes to its parameters would be lost, and frees them
        if the shard was `written` to since, or is about to be."""


PLAIN = Guard()
