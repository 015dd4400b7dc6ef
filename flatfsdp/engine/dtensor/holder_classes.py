"""Attributes and classes of users' parameters, on the DTensors that stand for them at rest.

A parameter's DTensor shares the attributes of its leaf: what a user sets on one, also after sharding, is on both
([Note: marks of parameters]). If the parameter is of a subclass of `nn.Parameter`, its DTensor is of a class that
derives from both.
"""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import torch
from torch import nn

from ..base import _dtensor
from ..flat.guard import ORIGINAL


def mark(holder: torch.Tensor, leaf: nn.Parameter) -> None:
    """Give `holder`, a parameter that is a DTensor, the attributes and the class of `leaf`. Its own attributes are
    kept, for both."""
    shared = vars(leaf)
    if vars(holder) is not shared:
        shared.update(vars(holder))
        holder.__dict__ = shared
    cls = ORIGINAL[type(leaf)]
    if cls is not nn.Parameter and type(holder) is _dtensor.dtensor_type():
        holder.__class__ = holder_class(cls)


@cache
def holder_class(cls: type[nn.Parameter]) -> type:
    """The class of DTensors that stand for parameters of the class `cls`; that of DTensors if there can be none."""
    base: type = _dtensor.dtensor_type()
    # Such a class decides itself what operations do; objects of another layout cannot change their class.
    if nn.Parameter not in cls.__mro__ or cls.__torch_function__ is not nn.Parameter.__torch_function__:
        return base
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__slots__": ()}
    try:
        return type(cls.__name__, (_AsDTensor, base, cls), names)
    except TypeError:
        return base


class _AsDTensor:
    """Copies of such an object have its class; pickles have DTensors, which need none of these classes."""

    __slots__ = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) in memo:
            return memo[id(self)]
        cls = type(self)
        self.__class__ = _dtensor.dtensor_type()
        try:
            made = copy.deepcopy(self, memo)
        finally:
            self.__class__ = cls
        made.__class__ = cls
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        cls = type(self)
        self.__class__ = _dtensor.dtensor_type()
        try:
            return self.__reduce_ex__(protocol)
        finally:
            self.__class__ = cls
