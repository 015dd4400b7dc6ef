"""Checkpoints that any number of ranks can read.

`save`, `load` and `async_save` are collective; a folder is a complete checkpoint or what it was before, whatever moment
a process ends at. Folders are read without executing anything, and by torch.distributed.checkpoint (DCP) as its own
(all but the model, where that is safetensors).
"""

from __future__ import annotations

from .api import async_save, load, save
from .background import Saving
from .hugging_face import export_safetensors, load_safetensors
from .listing import Listed, listing
from .lock import locked
from .retention import Keeping, keep

__all__ = [
    "Keeping",
    "Listed",
    "Saving",
    "async_save",
    "export_safetensors",
    "keep",
    "listing",
    "load",
    "load_safetensors",
    "locked",
    "save",
]
