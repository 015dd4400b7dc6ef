"""Flat buffers that are allocated and freed by resizing one storage, and the count of live bytes.

[Note: one storage] Autograd keeps views of an unsharded weight (`weight.t()`), so forward and backward of a unit must
find it in the *same* storage object. A `FlatBuffer` therefore never changes its tensor; it gives the memory back by
resizing the storage to zero and takes it again by resizing it up.

[Note: limiter] The host knows at once on CPU that nothing uses a buffer any more, and so does the stream where it is
the caller's. Elsewhere it is held until more is needed. With the limit the unshard stream then waits: at most two units
hold memory besides those whose forward runs around them, the one in use and the one ahead or the one before it, so that
a gather need not wait for the computation that it could run beside. Without the limit the stream runs on, and memory is
given back where the device is found to be past.
"""

from __future__ import annotations

import functools
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ...errors import InternalError, UsageError, warn_once
from ..base import _torch
from ..base.overrides import Override
from .huge_pages import LEAST, adviser_for
from .streams import Device, Stream


class MemoryTracker:
    """Exact live bytes by kind, and their peaks.

    Kinds: `shard`, `unsharded`, `post_forward_shard`, `arrived` (large gradients as they came, before slots that are
    wider are taken), `slots` (unsharded gradients), `exchange` (of a reduction),
    `staging` (of several small units), `quantized` (what travels in few bits), `residual` (what that has lost),
    `reduced` (gradient shards before they become `.grad`), `partial` (sums that await an all-reduce),
    `summoned`, `host copy` (of persistent parameters).
    """

    def __init__(self) -> None:
        self.live: dict[str, int] = defaultdict(int)
        self._peaks: dict[str, int] = defaultdict(int)
        self.total = self.peak_total = 0  # live bytes of all kinds
        self.at_peak: dict[str, int] = {}  # `live` when the total was at its peak

    def add(self, kind: str, count: int) -> None:
        """`count` bytes of `kind` came to life."""
        live = self.live[kind] = self.live[kind] + count
        self.total += count
        if live > self._peaks[kind]:
            self._peaks[kind] = live
        if self.total > self.peak_total:
            self.peak_total = self.total
            self.at_peak = dict(self.live)

    def remove(self, kind: str, count: int) -> None:
        """`count` bytes of `kind` were freed."""
        if count > self.live[kind]:
            raise InternalError(f"memory tracker: {count} bytes of {kind!r} freed, only {self.live[kind]} are live")
        self.live[kind] -= count
        self.total -= count

    def move(self, kind: str, other: str, count: int) -> None:
        """`count` bytes of `kind` are of the `other` kind from now on."""
        self.live[kind] -= count
        live = self.live[other] = self.live[other] + count
        if live > self._peaks[other]:
            self._peaks[other] = live

    def allocate(self, kind: str, count: int) -> Callable[[], None]:
        """`count` bytes of `kind` came to life; what is returned is called when they are freed."""
        self.add(kind, count)
        return functools.partial(self.remove, kind, count)

    def peak(self, kind: str) -> int:
        """The most bytes of `kind` alive at once since the last `reset_peaks`."""
        return self._peaks[kind]

    def reset_peaks(self) -> None:
        """Start measuring peaks from what is alive now."""
        self._peaks = defaultdict(int, self.live)
        self.peak_total = self.total
        self.at_peak = dict(self.live)


_poisoned = Override(False)
# Inside, floating-point buffers are NaN when they are allocated and before they are freed: a double for tests.
poison = functools.partial(_poisoned.being, True)


class FlatBuffer:
    """A 1-D tensor whose memory comes and goes while the tensor object, its storage object and views of it stay.

    Attributes:
        tensor: shape (numel,); its contents are undefined after `allocate` and unreadable after `free`.
    """

    def __init__(
        self, numel: int, dtype: torch.dtype, device: torch.device, *, tracker: MemoryTracker, kind: str
    ) -> None:
        with torch.inference_mode(False):  # it serves training, whatever pass needs it first
            self.tensor = torch.empty(0, dtype=dtype, device=device)
        self._storage = self.tensor.untyped_storage()
        self._numel = numel
        self._bytes = numel * self.tensor.element_size()
        self._tracker = tracker
        self._kind = self._usual_kind = kind
        # Not of one without memory, of a dry run.
        is_large = self._bytes >= LEAST and type(self.tensor) is torch.Tensor
        self._advise = adviser_for(device, self._bytes) if is_large else None
        self._shaped = False  # whether the tensor has its elements, allocated or not
        self.allocated = False

    def now_holds(self, kind: str) -> None:
        """What lies in the memory is of another `kind` until it is freed."""
        self._tracker.move(self._kind, kind, self._bytes)
        self._kind = kind

    def allocate(self) -> None:
        """Take the memory; nothing happens if it is there."""
        if self.allocated:
            return
        try:
            self._storage.resize_(self._bytes)
        except RuntimeError:
            self._check_that_it_stays()
            self._tracker.remove(self._kind, self._bytes)  # it was counted all along
        if self._advise is not None:
            self._advise(self._storage.data_ptr(), self._bytes)
        if not self._shaped:
            # The stubs of torch lack the overload for untyped storages.
            self.tensor.set_(self._storage, 0, (self._numel,))  # type: ignore[call-overload]
            self._shaped = True
        self.allocated = True
        self._tracker.add(self._kind, self._bytes)
        if _poisoned.value and self.tensor.is_floating_point():
            self.tensor.fill_(float("nan"))

    def free(self) -> None:
        """Give the memory back; nothing happens if it is gone. The caller sees to it that nobody reads it any more."""
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
        self._tracker.remove(self._kind, self._bytes)
        self._kind = self._usual_kind
        if stays:
            self._tracker.add(self._kind, self._bytes)

    def _check_that_it_stays(self) -> bool:
        """True where the storage cannot be resized, and has its memory: a NumPy array was made of part of it, and may
        live. Called where resizing has failed.

        Raises:
            UsageError: it has no memory, and cannot get any.
        """
        if self._storage.resizable():
            raise  # what the caller handles
        if self._storage.nbytes() != self._bytes:
            raise UsageError(
                "a NumPy array was made of a view of a parameter whose memory had been given back, and torch gives "
                "memory of which there are arrays no other size: the parameters of that unit cannot be gathered any "
                "more. Make arrays while the parameter is whole, of a clone(), and build the model anew"
            )
        warn_once(
            "not resizable",
            "a NumPy array was made of a parameter while it was whole, as weight.detach().numpy() in a forward does: "
            "its unit's memory stays from now on, and such an array shows what comes there. Make arrays of a clone()",
        )
        return True

    @property
    def address(self) -> int:
        """Where the memory is; 0 while it is gone."""
        return self._storage.data_ptr()

    def users(self) -> tuple[float, ...]:
        """How many have the memory, where it is, and whether it can be given back: what changes where somebody else
        gets part of it."""
        if type(self.tensor) is not torch.Tensor:  # of a dry run
            return ()
        storage = self._storage
        return _torch.storage_uses(storage._cdata), sys.getrefcount(storage), storage.resizable(), storage.data_ptr()

    def disown(self) -> torch.Tensor:
        """Hand the memory to the caller; the next `allocate` takes new memory in a new tensor."""
        given, self.tensor = self.tensor, torch.empty(0, dtype=self.tensor.dtype, device=self.tensor.device)
        self._storage, self._shaped = self.tensor.untyped_storage(), False
        self.allocated = False
        self._tracker.remove(self._kind, self._bytes)
        return given


@dataclass(frozen=True, eq=False)
class DeferredFree:
    """A resharded buffer of `unit` that has its memory until the device is past `mark`."""

    unit: str
    mark: object
    buffer: FlatBuffer


class Limiter:
    """The memory that gathers on one stream take and that is given back to it.

    Attributes:
        limit: whether the stream waits for memory.
        held: what was resharded and has its memory still, oldest first.
    """

    def __init__(self, device: Device, stream: Stream, *, limit: bool) -> None:
        self._device = device
        self._stream = stream
        self.limit = limit
        self.held: list[DeferredFree] = []
        self._uploaded: object = None  # an event behind the last upload of an offloaded shard

    def free_later(self, unit: str, buffer: FlatBuffer) -> None:
        """Free `buffer`, memory of the stream, once the caller's stream is done with it."""
        if self._stream.is_callers:
            buffer.free()
        else:
            self.held.append(DeferredFree(unit, self._device.mark(), buffer))

    def make_room(self, needed: FlatBuffer | None, *, ahead: bool) -> None:
        """Memory is about to be taken on the stream, for `needed` if that exists; `ahead` of its use."""
        for held in self.held:
            if held.buffer is needed:
                self._stream.await_mark(held.mark)
        self.held = [held for held in self.held if held.buffer is not needed]
        if not self.limit:
            due = [held for held in self.held if self._device.is_past(held.mark)]
        elif ahead or not self.held:  # all but `needed`, which is in use again
            due = self.held
        else:
            due = [held for held in self.held if held.unit != self.held[-1].unit]
        self._free(due)

    def record_upload(self) -> None:
        """The stream was given a copy from an offloaded shard."""
        self._uploaded = self._stream.mark()

    def free_all(self) -> None:
        """An iteration ends: only shards hold memory, and offloaded ones are the host's to write to."""
        self._free(self.held)
        self._device.block_host(self._uploaded)  # an upload under way would read what the host writes next
        self._uploaded = None

    def _free(self, due: list[DeferredFree]) -> None:
        self.held = [held for held in self.held if held not in due]
        for held in due:
            self._stream.await_mark(held.mark)
            with self._stream.running():
                held.buffer.free()
