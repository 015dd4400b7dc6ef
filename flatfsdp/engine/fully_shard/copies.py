from typing import Any

from torch import nn


def deep_copy(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    raise NotImplementedError


def reduce(module: nn.Module) -> tuple[Any, ...]:
    raise NotImplementedError
