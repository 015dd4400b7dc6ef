"""Checkpoints that any number of ranks can read.

`save`, `load` and `async_save` are collective. At whatever moment a process ends, a folder is either a complete
checkpoint or as it was before the save. Folders are read without executing anything. torch.distributed.checkpoint (DCP)
reads them like its own, except for a model saved as safetensors.
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
