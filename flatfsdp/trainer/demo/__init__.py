"""What `python -m flatfsdp.train` trains when it is given nothing else: a transformer over the bytes of some text."""

from __future__ import annotations

from .options import DEFAULTS, DemoOptions

__all__ = ["DEFAULTS", "DemoOptions"]
