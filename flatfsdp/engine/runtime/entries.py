"""The modules whose forward runs a unit.

[Note: entries] A wrapper's unit has one entry, the module inside the wrapper. Several modules given to `fully_shard`
may share one unit. They hold it themselves, *in place* of a wrapper, and it holds them weakly: a deleted model would
otherwise wait for the garbage collector. Parameters are named by their paths from the entry; if there are several,
prefixed with the entry's number.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Generic, TypeVar, overload

from torch import nn

from ..base.fqns import fqn

M = TypeVar("M", bound=nn.Module)
PLAIN_CLASS = "_flatfsdp_plain_class"  # attribute of a class that replaces another one in place: the original


class WeakModules(Sequence[M], Generic[M]):
    """Modules that are held weakly: those that are still alive."""

    def __init__(self, modules: Iterable[M]) -> None:
        self._refs = [weakref.ref(module) for module in modules]

    def __iter__(self) -> Iterator[M]:
        return (module for ref in self._refs if (module := ref()) is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    @overload
    def __getitem__(self, index: int) -> M: ...
    @overload
    def __getitem__(self, index: slice) -> list[M]: ...
    def __getitem__(self, index: int | slice) -> M | list[M]:
        return list(self)[index]


class Entries:
    """The modules whose forward runs one unit. [Note: entries]

    Attributes:
        in_place: whether they hold the unit themselves, and no wrapper does.
        are_several: whether the unit was constructed from a list of modules.
        class_name: the class names of all entries, for messages.
        paths: of the entries in the outermost module, once that is known; "" for that module.
    """

    def __init__(self, modules: Sequence[nn.Module], *, in_place: bool) -> None:
        self.in_place = in_place
        self._modules: Sequence[nn.Module] = WeakModules(modules) if in_place else list(modules)
        self._count = len(modules)
        self.are_several = len(modules) > 1
        self.class_name = ", ".join(plain_class(module).__name__ for module in modules)
        self.paths: tuple[str, ...] = ("",) * len(modules)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._modules)

    @property
    def first(self) -> nn.Module:
        """The only entry; of several, the first that is alive."""
        return self._modules[0]

    def lacks(self, ran: set[int]) -> bool:
        """Whether some entry is not among those that `ran`, by their ids."""
        return len(ran) < self._count and any(id(module) not in ran for module in self._modules)

    def name(self, path_of: Callable[[nn.Module], str]) -> str:
        """Set the paths of all entries; returns the name of the unit."""
        self.paths = tuple(path_of(module) for module in self._modules) or ("",)
        return ", ".join(self.paths)

    def fqn(self, path: str) -> str:
        """The name, in the whole model, of the parameter or buffer with this `path` in the unit."""
        if not self.are_several:
            return fqn(self.paths[0], path)
        number, _, below = path.partition(".")
        return fqn(self.paths[int(number)], below) if int(number) < len(self.paths) else below


def plain_class(module: nn.Module) -> type[nn.Module]:
    """The class of `module`, or the original one if its class was replaced in place."""
    found: type[nn.Module] = getattr(type(module), PLAIN_CLASS, type(module))
    return found
