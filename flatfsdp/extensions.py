"""Parameters that are stored as one thing and computed with as another, as FSDP1's extensions. [Note: extensions]"""

from __future__ import annotations

from .engine.flat.extensions import FlatParamExtensions, set_extensions

__all__ = ["FlatParamExtensions", "set_extensions"]
