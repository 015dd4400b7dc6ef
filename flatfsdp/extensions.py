"""Parameters that are stored in one form and computed with in another, like FSDP1's extensions. [Note: extensions]"""

from __future__ import annotations

from .engine.transforms.extensions import FlatParamExtensions, set_extensions

__all__ = ["FlatParamExtensions", "set_extensions"]
