"""The default task of `python -m flatfsdp.train`: a transformer over the bytes of some text."""

from __future__ import annotations

from .options import DEFAULTS, DemoOptions

__all__ = ["DEFAULTS", "DemoOptions"]
