"""When resharded memory goes back: not before the device is past its last use, and not later than a bound allows.

[Note: limiter] The host knows at once on CPU that nothing uses a buffer any more, and so does the stream where it is
the caller's. Elsewhere it is held until more is needed. With the limit the unshard stream then waits: at most two units
hold memory besides those whose forward runs around them, the one in use and the one ahead or the one before it, so that
a gather need not wait for the computation that it could run beside. Without the limit the stream runs on, and memory is
given back where the device is found to be past.
"""

from __future__ import annotations

from dataclasses import dataclass

from .memory import FlatBuffer
from .streams import Device, Stream


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
