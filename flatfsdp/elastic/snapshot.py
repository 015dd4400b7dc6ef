"""A rank's state at one step, copied to host memory as one block of bytes.

A block begins with the *state*: the bytes of the tensors that a rank has, each at its offset, as the re-shard describes
them. The *tail* follows: plain data, encoded, whose length differs from step to step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..engine.base import _torch
from ..engine.device.streams import Device, pin
from .parity import ALIGNMENT


class Block:
    """The memory of one block, which is kept from step to step.

    Attributes:
        memory: uint8, all of it: zeros follow the block.
        state, tail: how many bytes of it are the state and, from there on, the tail.
    """

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)
        self.state = self.tail = 0
        self._views: list[torch.Tensor] = []
        self._views_for: object = None

    @property
    def nbytes(self) -> int:
        """Bytes of the block."""
        return self.state + self.tail

    def take(self, tensors: Sequence[torch.Tensor], offsets: Sequence[int], state: int, tail: bytes) -> None:
        """Copy `tensors` to these `offsets`, multiples of their items' size, into a state of so many bytes, and `tail`
        after it. Complete when this returns: the host waits once for each device."""
        self._reserve(state, len(tail))
        views = self._views_of(tensors, offsets)
        with torch.no_grad():
            by_device: dict[torch.device, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
            for view, tensor in zip(views, tensors, strict=True):
                into, of = by_device.setdefault(tensor.device, ([], []))
                into.append(view)
                of.append(tensor.detach())
            for device, (into, of) in by_device.items():
                if device.type == "cpu":
                    _torch.foreach_copy_(into, of)
                    continue
                stream = Device(device)
                for target, source in zip(into, of, strict=True):
                    target.copy_(source, non_blocking=True)
                stream.block_host(stream.mark())
            if tail:
                self.memory[state : state + len(tail)] = torch.frombuffer(bytearray(tail), dtype=torch.uint8)
            self.memory[state + len(tail) : self.nbytes].zero_()
        self.state, self.tail = state, len(tail)

    def _reserve(self, state: int, tail: int) -> None:
        """Have memory for a block of these sizes, with room for a longer tail."""
        if state + tail > self.memory.numel() or state < self.state // 2:
            room = (-(-(state + 2 * tail) // ALIGNMENT) + 1) * ALIGNMENT
            self.memory = pin(torch.zeros(room, dtype=torch.uint8))
            self._views_for = None

    def _views_of(self, tensors: Sequence[torch.Tensor], offsets: Sequence[int]) -> list[torch.Tensor]:
        described = tuple((offset, each.dtype, each.shape) for offset, each in zip(offsets, tensors, strict=True))
        if described != self._views_for:
            self._views = [
                self.memory[offset : offset + each.nbytes].view(each.dtype).view(each.shape)
                for offset, each in zip(offsets, tensors, strict=True)
            ]
            self._views_for = described
        return self._views

    def rows(self, count: int, size: int) -> torch.Tensor:
        """The block as `count` chunks of `size` bytes: shape (count, size), uint8; zeros follow the block."""
        if count * size > self.memory.numel():
            grown = pin(torch.zeros(count * size, dtype=torch.uint8))
            grown[: self.nbytes] = self.memory[: self.nbytes]
            self.memory, self._views_for = grown, None
        return self.memory[: count * size].view(count, size)
