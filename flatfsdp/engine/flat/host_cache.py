"""Unsharded parameters that stay between uses, because nothing changes them.

[Note: residents] A flat parameter that no optimizer steps need not be gathered for every use. A *resident* was gathered
once, and stays unsharded on the device, or as a copy in host memory from which the device is filled again: memory, or
the way from the host, in place of a collective. Whether a handle is a resident, and whether it has to be gathered, is
settled where a forward begins, and is part of what ranks compare there: no rank leaves a gather out alone. A resident
that was written to is gathered anew.
"""

from __future__ import annotations

import enum

import torch

from ..device.memory import MemoryTracker
from ..device.streams import PendingWork, Stream, pinned_like


class ParamPersistence(enum.Enum):
    """Where a resident stays."""

    DEVICE = "device"
    HOST = "host"


DEVICE, HOST = ParamPersistence


class HostCache:
    """The unsharded flat parameter in host memory, page-locked where there is an accelerator.

    Attributes:
        versions: of the handle, between uses, when it was made; others are those of other values.
    """

    def __init__(self, unsharded: torch.Tensor, *, tracker: MemoryTracker) -> None:
        """`unsharded`: 1-D and padded; the host waits until it is copied."""
        self._tensor = pinned_like(unsharded.detach())
        self._tensor.copy_(unsharded.detach())
        self._allocation = tracker.allocate("host copy", unsharded.numel() * unsharded.element_size())
        self.versions: tuple[int, ...] = ()

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of computation when it was made."""
        return self._tensor.dtype

    def upload(self, unsharded: torch.Tensor, stream: Stream) -> PendingWork:
        """Fill `unsharded`, like the one it was made of, on `stream`."""
        return stream.upload(unsharded, self._tensor)

    def free(self) -> None:
        """Give the memory back; no upload may be under way that the device has not been told of."""
        self._allocation.close()
