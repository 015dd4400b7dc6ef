"""The class and the function that files of sharded state dicts name, as `flatfsdp.owned.OwnedInterval`."""

from __future__ import annotations

from .engine.state.owned_interval import OwnedInterval as OwnedInterval
from .engine.state.owned_interval import _rebuild as _rebuild
