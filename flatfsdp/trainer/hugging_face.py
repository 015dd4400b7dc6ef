"""Models of transformers, without importing it: what they are asked, what is written beside their weights."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from flatfsdp import FullyShardedDataParallel


def without_cache(model: nn.Module) -> dict[str, Any]:
    """The argument that keeps a model of transformers from filling its cache of keys and values; for others none.

    Training reads no cache, and a layer that is computed again would add to it twice.
    """
    inside = plain(model)
    uses_it = getattr(getattr(inside, "config", None), "use_cache", False)
    return {"use_cache": False} if uses_it and "use_cache" in inspect.signature(inside.forward).parameters else {}


def takes_input_ids(model: nn.Module) -> bool:
    """Whether the tokens of `model` have the name that transformers gives them."""
    return "input_ids" in inspect.signature(plain(model).forward).parameters


def plain(model: nn.Module) -> nn.Module:
    """The model inside FSDP's wrapper, and inside PEFT's."""
    inside = model.module if isinstance(model, FullyShardedDataParallel) else model
    base = getattr(inside, "get_base_model", None)
    return base() if callable(base) else inside
