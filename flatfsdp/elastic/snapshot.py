"""A rank's state at one step, copied to host memory as one block of bytes, which outlives its process.

A block begins with the *state*: the bytes of the tensors that a rank has, each at its offset, as the re-shard describes
them. The *tail* follows: plain data, encoded, whose length differs from step to step.

[Note: blocks in files] A block lies in an anonymous file (`memfd_create(2)`), which other ranks of its machine hold
open ([Note: blocks of a machine]): when the process is killed, they read it there. The file goes with the last process
that holds it, so that nothing is left after the job. Words at its beginning show whether the block is *whole*: that
word is taken back before the first byte of a copy is written, and set after the last. So a rank that is killed in the
middle of a copy leaves a block that nobody takes for whole. (A processor may show the words in another order to others
while the process runs; not once it has ended.) A file grows, and never shrinks: those that map it are safe.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence

import torch

from ..engine.base import _torch
from ..engine.base.plain_data import bytes_of
from ..engine.cpu.segments import MemorySegment, create
from .parity import ALIGNMENT

HEADER = 4096  # bytes before a block
_WHOLE, _NUMBER, _STATE, _TAIL = range(4)  # words in it


class Block:
    """The memory of one block, which is kept from step to step. [Note: blocks in files]

    Attributes:
        descriptor: of its file.
        memory: uint8, all of it; the block is at its beginning.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        """A new one, or that of a file.

        Raises:
            OSError: there is not enough memory, or the system has no such files.
        """
        self.descriptor = create(HEADER, grows=True) if descriptor is None else descriptor
        weakref.finalize(self, os.close, self.descriptor)
        self.map()

    @classmethod
    def of_process(cls, pid: int, descriptor: int) -> Block:
        """The block of a process that runs on this machine, to be read only; `map` it again when it may have grown.

        Raises:
            OSError: this process may not.
        """
        return cls(os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC))

    @property
    def number(self) -> int | None:
        """Of the step whose block is whole here; None while it is not."""
        return self._words[_NUMBER] if self._words[_WHOLE] else None

    @property
    def state(self) -> int:
        """How many bytes are the state."""
        return self._words[_STATE]

    @property
    def tail(self) -> bytes:
        """The tail, which follows the state."""
        return bytes(bytes_of(self.memory[self.state : self.nbytes]))

    @property
    def nbytes(self) -> int:
        """Bytes of the block."""
        return self.state + self._words[_TAIL]

    def take_back(self) -> None:
        """From here on the block is not whole."""
        self._words[_WHOLE] = 0

    def set_whole(self, number: int) -> None:
        """The block is whole from here on: that of the step with this number."""
        self._words[_NUMBER] = number
        self._words[_WHOLE] = 1  # after everything else

    def take(self, tensors: Sequence[torch.Tensor], offsets: Sequence[int], state: int, tail: bytes) -> None:
        """Copy `tensors` to these `offsets`, multiples of their items' size, into a state of so many bytes, and `tail`
        after it. Complete when this returns."""
        if state + len(tail) > self.memory.numel():
            self._reserve(state + 2 * len(tail))  # with room for a longer tail
        if tensors:
            _torch.foreach_copy_(self._views_of(tensors, offsets), [each.detach() for each in tensors])
        if tail:
            self.memory[state : state + len(tail)] = torch.frombuffer(bytearray(tail), dtype=torch.uint8)
        self._words[_STATE], self._words[_TAIL] = state, len(tail)

    def _reserve(self, size: int) -> None:
        """Have memory for so many bytes. What is there stays."""
        size = HEADER + -(-size // ALIGNMENT) * ALIGNMENT
        os.posix_fallocate(self.descriptor, 0, size)
        self.map()

    def map(self) -> None:
        """Have all of the file as memory, which stays mapped while a view of it lives."""
        segment = MemorySegment(self.descriptor, os.fstat(self.descriptor).st_size)
        self._words = memoryview(segment.memory)[:HEADER].cast("q")
        self.memory = segment.bytes[HEADER:]
        self._views: list[torch.Tensor] = []
        self._views_for: object = None

    def _views_of(self, tensors: Sequence[torch.Tensor], offsets: Sequence[int]) -> list[torch.Tensor]:
        described = tuple((offset, each.dtype, each.shape) for offset, each in zip(offsets, tensors, strict=True))
        if described != self._views_for:
            self._views = [
                self.memory[offset : offset + each.nbytes].view(each.dtype).view(each.shape)
                for offset, each in zip(offsets, tensors, strict=True)
            ]
            self._views_for = described
        return self._views
