"""Pickles of modules of `fully_shard`, whose classes are swapped in place. [Note: plans of units]"""

from __future__ import annotations

from typing import Any

from torch import nn

from ..runtime.entries import plain_class
from ..wrapping import serialization
from ..wrapping.serialization import UnitPlan as UnitPlan  # pickles name it, and `_load`, here
from ..wrapping.serialization import _load as _load
from .class_swap import swap_class


def reduce(module: nn.Module, front: type) -> tuple[Any, ...]:
    """The value of `__reduce_ex__` for `module`, whose class derives from `front`."""
    return serialization.reduce(module, _blank, front, plain_class(module))


def _blank(front: type, plain: type[nn.Module]) -> nn.Module:
    made = plain.__new__(plain)
    swap_class(made, front)
    return made
