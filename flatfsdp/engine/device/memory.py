"""Flat buffers that are allocated and freed by resizing one storage, and the tracking of live bytes.

[Note: one storage] Autograd saves views of an unsharded weight (`weight.t()`), so forward and backward of a unit must
find it in the *same* storage object. A `FlatBuffer` therefore never changes its tensor; it frees the memory by resizing
the storage to zero, and allocates it again by resizing the storage back.

[Note: limiter] On a CPU, and if gathers use the caller's stream, a resharded buffer can be freed at once. Otherwise it
is held until memory is needed. With the limit the unshard stream then waits, so that at most two units hold memory, in
addition to those whose forward encloses them: the one in use, and the prefetched or the previous one. Two are needed
so that a gather can overlap with the computation before it. Without the limit the stream does not wait, and buffers are
freed that the device is found to have finished with.

[Note: out of memory] If an allocation fails, held buffers of all models are freed, in the order of their streams as
always, and that allocation is tried once more: torch's allocator then gives their memory back to the device, which
waits. Nothing else is repeated, least of all a collective.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ...errors import InternalError, UsageError, warn_once
from ..base.overrides import Override
from .streams import Device, Stream


class MemoryTracker:
    """Exact live bytes by category, and their peaks.

    Namely `shard`, `unsharded`, `post_forward_shard`, `arrived` (large gradients as computed, before wider slots are
    allocated), `slots` (unsharded gradients), `exchange` (scratch of a reduction), `staging` (of several small units),
    `quantized` (encoded parameters and gradients), `residual` (quantization errors), `reduced` (gradient shards before
    they become `.grad`), `partial` (sums that await an all-reduce), `summoned`, `host copy` (of persistent parameters),
    `matrices` (that an optimizer needs whole: sent, arrived, put together).

    Attributes:
        advise: called with a flat buffer or a result of a reduction whose memory was just allocated.
        advised_from: bytes of the smallest one it is called with.
        apart: `new_empty` for memory that stays when a step is over.
    """

    def __init__(self, advise: Callable[[torch.Tensor], object] = id, advised_from: float = math.inf) -> None:
        self.advise, self.advised_from = advise, advised_from
        self.apart: Callable[[torch.Tensor, int], torch.Tensor] = torch.Tensor.new_empty
        self.live: dict[str, int] = defaultdict(int)
        self._peaks: dict[str, int] = defaultdict(int)
        self.total = self.peak_total = 0  # live bytes of all categories
        self.at_peak: dict[str, int] = {}  # `live` when the total was at its peak

    def add(self, category: str, count: int) -> None:
        """Count `count` bytes of `category` as allocated."""
        live = self.live[category] = self.live[category] + count
        self.total += count
        if live > self._peaks[category]:
            self._peaks[category] = live
        if self.total > self.peak_total:
            self.peak_total = self.total
            self.at_peak = dict(self.live)

    def remove(self, category: str, count: int) -> None:
        """Count `count` bytes of `category` as freed."""
        if count > (live := self.live[category]):
            raise InternalError(f"memory tracker: {count} bytes of {category!r} freed, only {live} are live")
        self.live[category] -= count
        self.total -= count

    def move(self, category: str, other: str, count: int) -> None:
        """Count `count` bytes of `category` as bytes of the `other` category from now on."""
        self.live[category] -= count
        live = self.live[other] = self.live[other] + count
        if live > self._peaks[other]:
            self._peaks[other] = live

    def allocate(self, category: str, count: int) -> Callable[[], None]:
        """Count `count` bytes of `category` as allocated; returns a function to call when they are freed."""
        self.add(category, count)
        return functools.partial(self.remove, category, count)

    def peak(self, category: str) -> int:
        """The most live bytes of `category` at any time since the last `reset_peaks`."""
        return self._peaks[category]

    def reset_peaks(self) -> None:
        """Restart the peaks from the bytes that are live now."""
        self._peaks = defaultdict(int, self.live)
        self.peak_total = self.total
        self.at_peak = dict(self.live)


_poisoned = Override(False)
# A context in which floating-point buffers are filled with NaN when allocated and before being freed, for tests.
poison = functools.partial(_poisoned.being, True)


class FlatBuffer:
    """A 1-D tensor whose memory is allocated and freed while the tensor, its storage object and its views stay.

    Attributes:
        tensor: shape (numel,); its contents are undefined after `allocate` and unreadable after `free`.
    """

    def __init__(
        self, numel: int, dtype: torch.dtype, device: torch.device, *, tracker: MemoryTracker, category: str
    ) -> None:
        with torch.inference_mode(False):  # used in training, even if first requested in inference mode
            self.tensor = torch.empty(0, dtype=dtype, device=device)
        self._storage = self.tensor.untyped_storage()
        self._numel = numel
        self._bytes = numel * self.tensor.element_size()
        self._tracker = tracker
        self._category = self._usual_category = category
        self._shaped = False  # whether the tensor has its elements, allocated or not
        self.allocated = False

    def now_holds(self, category: str) -> None:
        """Count the memory as another `category` until it is freed."""
        self._tracker.move(self._category, category, self._bytes)
        self._category = category

    def allocate(self) -> None:
        """Allocate the memory; does nothing if it is allocated."""
        if self.allocated:
            return
        try:
            try:
                self._storage.resize_(self._bytes)
            except torch.OutOfMemoryError:
                free_held()
                self._storage.resize_(self._bytes)
        except RuntimeError:
            self._check_that_it_stays()
            self._tracker.remove(self._category, self._bytes)  # counted already: the memory was never freed
        if not self._shaped:
            # The stubs of torch lack the overload for untyped storages.
            self.tensor.set_(self._storage, 0, (self._numel,))  # type: ignore[call-overload]
            self._shaped = True
        self.allocated = True
        self._tracker.add(self._category, self._bytes)
        if self._bytes >= self._tracker.advised_from:
            self._tracker.advise(self.tensor)
        if _poisoned.value and self.tensor.is_floating_point():
            self.tensor.fill_(float("nan"))

    def free(self) -> None:
        """Free the memory; does nothing if it is freed. The caller ensures that no code reads it afterwards."""
        if not self.allocated:
            return
        if _poisoned.value and self.tensor.is_floating_point():
            self.tensor.fill_(float("nan"))
        stays = False
        try:
            self._storage.resize_(0)
        except RuntimeError:
            stays = self._check_that_it_stays()
        self.allocated = False
        self._tracker.remove(self._category, self._bytes)
        self._category = self._usual_category
        if stays:
            self._tracker.add(self._category, self._bytes)

    def _check_that_it_stays(self) -> bool:
        """Return True if the storage cannot be resized, but has its memory: a NumPy array was made of part of it, and
        may still exist. Called when resizing has failed.

        Raises:
            UsageError: it has no memory, and cannot get any.
        """
        if self._storage.resizable():
            raise  # the exception that the caller handles
        if self._storage.nbytes() != self._bytes:
            raise UsageError(
                "a NumPy array was made from a view of a parameter whose memory had been freed, and torch cannot "
                "resize memory that an array uses: the parameters of that unit can no longer be gathered. Make arrays "
                "from a clone() while the parameter is unsharded, and build the model again"
            )
        warn_once(
            "not resizable",
            "a NumPy array was made from a parameter while it was unsharded, for example by weight.detach().numpy() "
            "in a forward: the memory of its unit is kept from now on, and the array will show whatever is stored "
            "there later. Make arrays from a clone()",
        )
        return True

    @property
    def address(self) -> int:
        """The address of the memory; 0 while it is freed."""
        return self._storage.data_ptr()

    def disown(self) -> torch.Tensor:
        """Pass the tensor with its memory to the caller; the next `allocate` makes a new tensor with new memory."""
        given, self.tensor = self.tensor, torch.empty(0, dtype=self.tensor.dtype, device=self.tensor.device)
        self._storage, self._shaped = self.tensor.untyped_storage(), False
        self.allocated = False
        self._tracker.remove(self._category, self._bytes)
        return given


@dataclass(frozen=True, eq=False)
class DeferredFree:
    """A resharded buffer of `unit` whose memory is freed after the device has reached `mark`."""

    unit: str
    mark: object
    buffer: FlatBuffer


_limiters: weakref.WeakSet[Limiter] = weakref.WeakSet()


def free_held() -> None:
    """Free all held buffers, so that the allocation that has failed can be tried again. [Note: out of memory]

    Raises:
        torch.OutOfMemoryError: that of the allocation, which the caller handles; no buffer was held.
    """
    if not any([limiter.free_held() for limiter in [*_limiters]]):
        raise


class Limiter:
    """Controls the memory that gathers on one stream allocate, and frees it on that stream. [Note: limiter]

    Attributes:
        limit: whether the stream waits for memory.
        held: resharded buffers that still have their memory, oldest first.
    """

    def __init__(self, device: Device, stream: Stream, *, limit: bool) -> None:
        self._device = device
        self._stream = stream
        self.limit = limit
        self.held: list[DeferredFree] = []
        _limiters.add(self)
        self._uploaded: object = None  # an event after the last upload of an offloaded shard

    def free_later(self, unit: str, buffer: FlatBuffer) -> None:
        """Free `buffer`, memory of the stream, once the caller's stream has finished with it."""
        if self._stream.is_callers:
            buffer.free()
        else:
            self.held.append(DeferredFree(unit, self._device.mark(), buffer))

    def make_room(self, needed: FlatBuffer | None, *, ahead: bool) -> None:
        """Free held buffers before memory is allocated on the stream, for `needed` if given; `ahead`: a prefetch."""
        for held in self.held:
            if held.buffer is needed:
                self._stream.await_mark(held.mark)
        self.held = [held for held in self.held if held.buffer is not needed]
        if not self.limit:
            due = [held for held in self.held if self._device.is_past(held.mark)]
        elif ahead or not self.held:  # all except `needed`, which is in use again
            due = self.held
        else:
            due = [held for held in self.held if held.unit != self.held[-1].unit]
        self._free(due)

    def record_upload(self) -> None:
        """Record that a copy from an offloaded shard was issued on the stream."""
        self._uploaded = self._stream.mark()

    def free_held(self) -> bool:
        """Free all held buffers; returns whether there were any."""
        found = bool(self.held)
        self._free(self.held)
        return found

    def free_all(self) -> None:
        """At the end of an iteration, free all held buffers, and wait until the host may write to offloaded shards."""
        self._free(self.held)
        self._device.block_host(self._uploaded)  # an upload in flight would read values that the host writes next
        self._uploaded = None

    def _free(self, due: list[DeferredFree]) -> None:
        self.held = [held for held in self.held if held not in due]
        for held in due:
            self._stream.await_mark(held.mark)
            with self._stream.running():
                held.buffer.free()
