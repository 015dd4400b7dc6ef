"""Copies of tensors on the host, for code that reads them while the device goes on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch

from ..engine.device.streams import Device, pinned_like


class HostCopies:
    """Copies of sets of tensors. On an accelerator they are in page-locked memory, which is kept for the next set."""

    def __init__(self) -> None:
        self._kept: list[torch.Tensor] = []

    def of(self, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Copies of `tensors`, complete when this returns: the host waits once per device.

        Those of the set before on an accelerator are overwritten: the caller ensures that no code reads them any more.
        """
        free: dict[tuple[torch.Size, torch.dtype], list[torch.Tensor]] = defaultdict(list)
        for kept in self._kept:
            free[kept.shape, kept.dtype].append(kept)
        self._kept, copies, devices = [], [], dict[torch.device, Device]()
        for tensor in tensors:
            device = devices.get(tensor.device) or devices.setdefault(tensor.device, Device(tensor.device))
            if device.has_streams:
                known = free[tensor.shape, tensor.dtype]
                copy = known.pop() if known else pinned_like(tensor.detach())
                copy.copy_(tensor.detach(), non_blocking=True)
                self._kept.append(copy)
            else:
                copy = tensor.detach().to("cpu", copy=True)
            copies.append(copy)
        for device in devices.values():
            device.block_host(device.mark())
        return copies
