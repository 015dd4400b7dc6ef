"""Fully sharded data parallel training over flat parameters."""

from __future__ import annotations

__version__ = "0.1.0"
