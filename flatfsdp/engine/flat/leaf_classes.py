"""Classes that parameters are of for a time: the same objects, whose use is refused or noticed meanwhile.

A subclass of `nn.Parameter` that a user made gets a class of its own, which `isinstance` takes for the same.
"""

from __future__ import annotations

import copy
import types
from typing import Any

import torch
from torch import nn

from .deferred_grad import DeferredGradParameter
from .write_tracker import TracksWrites

ORIGINAL: dict[type, type] = {}  # by class for a time, that of before


class ClassVariants(dict[type, type]):
    """By class of a parameter, the class that it is of for a time."""

    def __init__(self, variant: type[nn.Parameter]) -> None:
        """`variant` is that of `nn.Parameter`."""
        super().__init__({nn.Parameter: variant, variant: variant})
        self._variant = variant
        ORIGINAL[variant] = nn.Parameter

    def __missing__(self, kind: type) -> type:
        original = ORIGINAL.get(kind, kind)
        self[kind] = self._derived(original) if original is kind else self[original]
        return self[kind]

    def _derived(self, kind: type) -> type:
        """The variant of a class of the user's; the class itself where its objects can be of no other."""
        if nn.Parameter not in kind.__mro__:
            return kind
        try:
            made = types.new_class(f"{self._variant.__name__}Of{kind.__name__}", (self._variant, kind))
            nn.Parameter.__new__(kind, torch.empty(0)).__class__ = made  # type: ignore[assignment]
        except (TypeError, RuntimeError):
            return kind
        ORIGINAL[made] = kind
        self[made] = made
        return made


class CopiedAsOriginal:
    """Whose copies are of the class that the parameter was of before."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        kind = type(self)
        self.__class__ = ORIGINAL[kind]
        try:
            return copy.deepcopy(self, memo)
        finally:
            self.__class__ = kind


class WriteTrackedParameter(CopiedAsOriginal, TracksWrites, nn.Parameter):
    """What `nn.Parameter` objects are while they show an unsharded form that is about to be freed, to who asked for it
    or holds it in the place of a flat parameter; never constructed."""


NOTICED = ClassVariants(WriteTrackedParameter)
NOTICED[DeferredGradParameter] = DeferredGradParameter  # which notices writes
