"""Memory of gathers, borrowed for the gradients of the outermost unit.

[Note: borrowed memory] The outermost unit's late slots ([Note: late slots]) are often the largest request of a step,
and come when the gradients of all other units lie where activations were, between pieces that are too small. But no
unit is unsharded then, so the memory of gathers is free, and in one piece if it was taken as one ([Note: compaction]).
The slots are used on the caller's stream, which waits for that of gathers, on which no gather is under way; their
memory goes back when the caller's stream has finished with it, and before any later gather.
"""

from __future__ import annotations

import weakref

from ..comm.tensor_groups import TensorGroup
from ..device.memory import FlatBuffer
from ..device.streams import Stream
from ..flat.flat_param import FlatParamHandle
from ..runtime.unit import Unit


class BorrowedBuffer(FlatBuffer):
    """The slots of a handle of `unit`, which is outermost.

    Attributes:
        borrows: whether they may have the memory of gathers; at first they may not.
    """

    def __init__(self, unit: Unit, handle: FlatParamHandle) -> None:
        numel, dtype = handle.layout.padded_numel, handle.precision.reduce
        super().__init__(numel, dtype, handle.device, tracker=handle.tracker, category="slots")
        self.borrows = False
        self._unit = weakref.ref(unit)
        self._owner: Stream | None = None  # of the memory, if it is borrowed

    def allocate(self) -> None:
        unit = self._unit()
        if not self.allocated:
            self._owner = None  # of memory that somebody else has taken over since
        if self.allocated or not self.borrows or unit is None or not _is_last(unit):
            super().allocate()
            return
        stream = unit.resources.streams.unshard
        with stream.running():
            super().allocate()
        unit.resources.device.await_mark(stream.mark())
        self._owner = stream

    def free(self) -> None:
        owner, self._owner = self._owner, None
        if owner is None or not self.allocated:
            super().free()
            return
        owner.follow_compute()
        with owner.running():
            super().free()


def _is_last(unit: Unit) -> bool:
    """Whether no unit holds unsharded memory in a backward that reduces `unit` now. A communication hook would own the
    memory."""
    return begins_late(unit) and not unit.resources.tracker.live["unsharded"] and unit.options.comm_hook is None


def begins_late(unit: Unit) -> bool:
    """Whether the last gradient of `unit` has arrived, all of which were kept as they came."""
    return any(grads.slots.late for grads in unit.grads) and not any(grads.missing for grads in unit.grads)


def borrowed_buffer(unit: Unit) -> BorrowedBuffer | None:
    """A buffer for the largest late slots of `unit`, which had no backward yet; None if it has none."""
    late = [
        (handle.layout.padded_numel, handle, grads)
        for handle, _, grads in unit.kinds
        if handle.options.trainable
        and handle.precision.reduce.itemsize > handle.precision.compute.itemsize
        and not handle.is_unsharded_at_rest
    ]
    if not late:
        return None
    _, handle, grads = max(late, key=lambda each: each[0])
    made = BorrowedBuffer(unit, handle)
    grads.reuse((made, [], TensorGroup()))
    return made
