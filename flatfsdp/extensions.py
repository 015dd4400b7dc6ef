"""Parameters that are stored in one form and computed with in another, like FSDP1's extensions. [Note: extensions]"""

from __future__ import annotations

from .engine.transforms.extensions import FlatParamExtensions, set_extensions
from .engine.transforms.quantized_rows import QuantizedRows

__all__ = ["FlatParamExtensions", "QuantizedRows", "set_extensions"]
