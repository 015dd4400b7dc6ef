"""Where the gradients of one handle collect until a reduction takes them.

[Note: gradient slots] As a leaf's gradient arrives it is moved, with the cast to the reduce dtype, into its *slot*: its
range of a flat buffer laid out like the parameter. Large ones are moved at once; small ones are collected up to
`COLLECT_BYTES` and moved by one call. When the unit's last expected gradient is in, the buffer is reduce-scattered
(`Reduction`), and later gradients go to other slots. Slots that received nothing count as zero; if that is so on all
ranks, their leaves get no gradient ([Note: unused]).

[Note: slot sharing] A parameter is not read after its gradient has arrived, so its own range of the unsharded buffer
can be its slot: the unit's memory is not needed twice. That takes equal dtypes, a backward that reduces and will not be
differentiated, and a unit of which an earlier backward has shown that each gradient comes once and in the backward's
own graph task; elsewhere (recomputation in tasks of their own) a parameter may be read after its gradient has come.
Where that shows for the first time, and no gradient lies in such a range yet, the slots get memory of their own.
Overwritten values cannot be read unnoticed: saved views of them are refused by their version, the leaf itself is hidden
([Note: guarded parameters]). A unit whose forward runs again before its reduction is refused, once: another gather
would be a collective that only the ranks that share would issue. Padding between the ranges is that of the shards:
zero; if a user wrote to all of a flat parameter, it is cleared.

[Note: late slots] Slots wider than the gradients (float32 for bfloat16) take twice their memory. While a reduction
holds its input, or other units' gradients are reduced first, gradients are kept as they arrived. The slots are
allocated when the unit's own reduction begins and the previous input is free; the parameters are freed first if they
will not be read again. So one unit at a time has gradients in the wide dtype. Of the outermost unit, whose first
gradient comes first and whose last comes last, they are narrow for most of the backward.

[Note: window] Without synchronization the slots stay, and the next microbatch adds to them: a *window*. Microbatches
without synchronization came before, so the next synchronized backward reduces, on every rank alike, whether or not
gradients arrived on this one.

[Note: partial sums] A reduction may stop after the shard axis: the results of several of them add up, unscaled, until
one continues along the replicate axis with the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from ...errors import UsageError, fail
from ..base import _torch
from ..comm.tensor_groups import TensorGroup
from ..device.memory import FlatBuffer
from .flat_param import COLLECT_BYTES, SMALL_BYTES, FlatParamHandle
from .layout_views import full_views, segments_of
from .reduction import ReductionInput, release_inputs
from .views import ParamViews

Window = tuple[FlatBuffer, list[torch.Tensor], TensorGroup]  # memory, the slots in it, and its segments


class SlotMemory:
    """The buffers of one handle's slots, reused in every backward: one for each dtype, and those that had another owner
    meanwhile.

    Attributes:
        missing: the value of gradients that do not come, where others do.
    """

    def __init__(self, handle: FlatParamHandle, views: ParamViews, reducing: Sequence[ReductionInput]) -> None:
        """`reducing`: the reductions that still read buffers; the list changes with time."""
        self.handle = handle
        self.views = views
        self.numels = [spec.numel for spec in handle.layout.params]
        self.indices = list(range(len(self.numels)))
        self._reducing = reducing
        self.missing: complex = 0.0
        self._buffers: dict[torch.dtype, list[Window]] = {}  # the last one is in use, or is the next

    def allocate(self, dtype: torch.dtype) -> Window:
        """The buffer of that dtype, with zeros in the padding, the slots in it, and its segments."""
        handle = self.handle
        kept = self._buffers.setdefault(dtype, [])
        buffer, slots, segments = kept[-1] if kept else (None, [], TensorGroup())
        if buffer is not None and buffer.allocated:
            # A late gradient while the buffer's reduction is in flight: finish that reduction first.
            release_inputs(self._reducing)
        if buffer is None or (handle.is_unsharded_at_rest and buffer.tensor.numel() == 0):
            buffer = FlatBuffer(
                handle.layout.padded_numel, dtype, handle.device, tracker=handle.tracker, category="slots"
            )
            slots = []
        buffer.allocate()
        if not slots:
            slots = full_views(buffer.tensor, handle.layout)
            whole = handle.is_unsharded_at_rest  # checked here, as the buffer is another one each time there
            segments = TensorGroup([buffer.tensor]) if whole else segments_of(buffer.tensor, handle.layout)
        kept[-1:] = [(buffer, slots, segments)]
        for gap in handle.layout.gaps:
            buffer.tensor[gap.slice].zero_()
        return buffer, slots, segments

    def forget(self, dtype: torch.dtype) -> Window:
        """Forget the buffer of that dtype, which gets another owner."""
        return self._buffers[dtype].pop()

    def reuse(self, given: Window) -> None:
        """Free a buffer that was forgotten, and use it for later slots: the next ones, if there is no other."""
        given[0].free()
        self._buffers.setdefault(given[0].tensor.dtype, []).insert(0, given)


class GradientSlots:
    """One filling of the slots: the gradients until a reduction begins, or the window is dropped.

    Attributes:
        dtype: of the slots, unless they are the parameters' memory.
        factor: the factor that gradients are multiplied by on their way in.
        shares: gradients go to the parameters' memory. [Note: slot sharing]
        return_buffer: gives back the parameters' memory, once the slots own it.
        buffer: None until a gradient was moved; segments: the parts of it that are reduced. [Note: pieces]
        filled: the leaves whose slots have a gradient.
        collected: gradients that are not moved yet, by leaf.
        may_wait: whether they should not be moved before the reduction; None if that gains nothing.
        late: whether they are not. [Note: late slots]
    """

    def __init__(self, memory: SlotMemory, dtype: torch.dtype, factor: float) -> None:
        self._memory = memory
        self.may_wait: Callable[[], bool] | None = None
        self.late = False
        self._late_bytes = 0
        self.dtype = dtype
        self.factor = factor
        self.shares = False
        self.return_buffer: Callable[[FlatBuffer], None] | None = None
        self.buffer: FlatBuffer | None = None
        self.segments = TensorGroup()
        self.filled: set[int] = set()
        self.collected: dict[int, torch.Tensor] = {}
        self._collected_bytes = 0
        self._slots: list[torch.Tensor] = []

    def put(self, index: int, grad: torch.Tensor) -> None:
        """Move `grad` (of leaf `index`, compute dtype) into its slot: now, with other small ones, or late."""
        size = self._memory.numels[index] * grad.element_size()
        if index in self.collected:
            self.move_collected()
        if self.may_wait is not None and not self.late and self.buffer is None:
            self.late = self.may_wait()
        if size > SMALL_BYTES and not self.late:
            self._move({index: grad})
            return
        self.collected[index] = grad
        if size > SMALL_BYTES:
            self._late_bytes += size
            self._memory.handle.tracker.add("arrived", size)
            return
        self._collected_bytes += size
        if self._collected_bytes > COLLECT_BYTES and not self.late:
            self.move_collected()

    def _end_wait(self) -> None:
        self.may_wait, self.late = None, False
        self._memory.handle.tracker.remove("arrived", self._late_bytes)
        self._late_bytes = 0

    def move_collected(self, *, freeing: bool = False) -> None:
        """Move the collected gradients; `freeing`: the handle gives its buffer up next, which hides all leaves."""
        if self.collected:
            collected, self.collected, self._collected_bytes = self.collected, {}, 0
            self._move(collected, freeing=freeing)
            if self.late:
                self._end_wait()

    def _move(self, grads: dict[int, torch.Tensor], *, freeing: bool = False) -> None:
        """Copy gradients, by index of their leaf, into their slots, or add them to earlier ones."""
        handle = self._memory.handle
        indices = list(grads)
        every = indices == self._memory.indices  # as nearly always, if they were collected
        if self.buffer is None:
            # Leaves that share a counter cannot be refused one by one, while others of them are still to be read.
            self.shares = self.shares and (freeing or handle.counted is handle.leaves)
            self.open()
        again = self.filled & grads.keys() if self.filled else ()
        fresh = [i for i in indices if i not in again] if again else indices
        if self.shares and not freeing and self.return_buffer is None:
            handle.writes.on_overwrite(fresh)
            self._memory.views.hide(fresh)
        if self.factor != 1.0:
            grads = {i: grad * self.factor for i, grad in grads.items()}
        slots = self._slots
        try:
            if fresh:
                copied = slots if every and not again else [slots[i] for i in fresh]
                _torch.foreach_copy_(copied, [grads[i] for i in fresh] if again else list(grads.values()))
            if again:
                _torch.foreach_add_([slots[i] for i in again], [_plain(grads[i]) for i in again])
        except RuntimeError:
            _check_dense(handle, grads)
            raise
        self.filled.update(grads)

    def open(self) -> FlatBuffer:
        """Choose the buffer for the slots, and return it."""
        if self.shares:
            handle = self._memory.handle
            unsharded = handle.unsharded
            assert unsharded.buffer is not None
            self.buffer, self._slots, self.segments = unsharded.buffer, unsharded.views, unsharded.segments
            for gap in handle.face.gaps:
                unsharded.flat[gap.slice].zero_()
        else:
            self.buffer, self._slots, self.segments = self._memory.allocate(self.dtype)
        return self.buffer

    def close(self, reduce: torch.dtype) -> FlatBuffer:
        """The gradients in `reduce`, and zeros for missing ones. Precondition: a shared buffer was taken over."""
        if self.collected:
            self.move_collected()
        if self.return_buffer is None:
            self.shares = False  # no gradient came: the memory stays the parameters', and may be freed at any time
        buffer = self.buffer or self.open()
        if len(self.filled) < len(self._slots):
            for i, slot in enumerate(self._slots):
                if i not in self.filled:
                    slot.fill_(self._memory.missing)
        if buffer.tensor.dtype != reduce:
            wide, self.dtype = buffer, reduce
            buffer = self.open()
            buffer.tensor.copy_(wide.tensor)
            wide.free()
        return buffer

    def free(self) -> None:
        """Drop the gradients and free their memory."""
        if self.late:
            self._end_wait()
        if self.return_buffer is not None and self.buffer is not None:
            self.return_buffer(self.buffer)
        elif self.buffer is not None and not self.shares:
            self.buffer.free()

    def disown(self) -> torch.Tensor:
        """Leave the memory to the caller; the next slots are in other memory."""
        assert self.buffer is not None
        buffer, self.buffer = self.buffer, None
        self._memory.forget(buffer.tensor.dtype)
        return buffer.disown()


class Marks:
    """The view that users have of windows: none, unless a subclass is attached that shows them. [Note: marks]"""

    def show(self, slots: GradientSlots, awaited: frozenset[int]) -> None:
        """A backward has left a window in `slots`, in which gradients of the leaves `awaited` may be."""

    def take_back(self, slots: GradientSlots) -> bool:
        """The next backward begins: it drops what users have dropped. Returns whether anything is left."""
        return True

    def end(self, slots: GradientSlots) -> None:
        """The window is dropped."""


class Accumulation:
    """The state of one handle's gradients that lasts across backwards.

    Attributes:
        window_open: microbatches without synchronization came before. [Note: window]
        partial: shape (shard_numel,), reduce dtype. [Note: partial sums]
        contributed: leaves for which this rank added a gradient to it.
        awaited: leaves that required a gradient in the unreduced sums, even if not now. The same on all ranks.
    """

    def __init__(self, handle: FlatParamHandle) -> None:
        self._handle = handle
        self.window_open = False
        self.awaited: frozenset[int] = frozenset()
        self.partial: torch.Tensor | None = None
        self.contributed: set[int] = set()

    @property
    def pending(self) -> bool:
        """Whether something is left to reduce: the next backward that reduces does, on all ranks."""
        return self.window_open or self.partial is not None

    def keep_partial(self, total: torch.Tensor | None, contributed: set[int]) -> None:
        """Replace the kept sum by `total`; None for nothing."""
        tracker = self._handle.tracker
        if self.partial is not None:
            tracker.remove("partial", self.partial.numel() * self.partial.element_size())
        if total is not None:
            tracker.add("partial", total.numel() * total.element_size())
        self.partial, self.contributed = total, contributed

    def close_window(self) -> None:
        """Forget the window."""
        self.window_open, self.awaited = False, frozenset()


def _plain(grad: torch.Tensor) -> torch.Tensor:
    """`grad`, as a plain tensor has it after a copy: a class with several tensors would add each of them."""
    if type(grad) is torch.Tensor:
        return grad
    return torch.empty(grad.shape, dtype=grad.dtype, device=grad.device).copy_(grad)


def _check_dense(handle: FlatParamHandle, grads: Mapping[int, torch.Tensor]) -> None:
    """Refuse gradients, by index of their leaf, that are not dense. Autograd holds them to the shape of their leaf."""
    for index, grad in grads.items():
        if grad.layout is not torch.strided:
            fail(
                UsageError(
                    f"parameter {handle.layout.params[index].name!r} of unit {handle.label} received a gradient of "
                    f"layout {grad.layout}; expected a dense layout, which can be reduced over ranks as one tensor. "
                    "Create the embedding without sparse=True, or list its module in ignored_modules= and average its "
                    "gradient yourself"
                )
            )
