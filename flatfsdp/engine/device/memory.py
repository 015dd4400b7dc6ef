"""Flat buffers that are allocated and freed by resizing one storage, their version counters, and the ledger of live
bytes.

[Note: one storage] Autograd keeps views of an unsharded weight (`weight.t()`), so forward and backward of a unit must
find it in the *same* storage object. A `FlatBuffer` therefore never changes its tensor; it gives the memory back by
resizing the storage to zero and takes it again by resizing it up.

[Note: versions] A freed storage must not be read through a saved view: on CPU that crashes the process, after a refill
with other weights it yields a wrong gradient. So freeing bumps the version counters of the parameters that live there,
and autograd refuses such a view in words. Filling the buffer with *unchanged* weights sets the counters back (else
`retain_graph` and every backward would be refused); a changed weight keeps the bump, so a graph older than the
optimizer's step is refused as in an unsharded model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter

import torch

from ...errors import InternalError
from ..base import _torch


class MemoryTracker:
    """Exact live bytes by kind, and their peaks.

    Kinds: `shard`, `unsharded`, `portion` (of unsharded parameters, between forward and backward), `slots` (unsharded
    gradients), `exchange` (scratch of a reduction), `staging` (of several small units), `reduced` (gradient shards
    before they become `.grad`), `partial` (sums that await an all-reduce), `summoned`, `host copy` (of residents).
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
            raise InternalError(f"ledger: {count} bytes of {kind!r} freed, only {self.live[kind]} are live")
        self.live[kind] -= count
        self.total -= count

    def move(self, kind: str, other: str, count: int) -> None:
        """`count` bytes of `kind` are of the `other` kind from now on."""
        self.live[kind] -= count
        live = self.live[other] = self.live[other] + count
        if live > self._peaks[other]:
            self._peaks[other] = live

    def allocate(self, kind: str, count: int) -> Allocation:
        """`count` bytes of `kind` came to life; what is returned says when they are freed."""
        self.add(kind, count)
        return Allocation(self, kind, count)

    def peak(self, kind: str) -> int:
        """The most bytes of `kind` alive at once since the last `reset_peaks`."""
        return self._peaks[kind]

    def reset_peaks(self) -> None:
        """Start measuring peaks from what is alive now."""
        self._peaks = defaultdict(int, self.live)
        self.peak_total = self.total
        self.at_peak = dict(self.live)


@dataclass(frozen=True, slots=True)
class Allocation:
    """Bytes in a ledger that one owner frees."""

    tracker: MemoryTracker
    kind: str
    count: int

    def close(self) -> None:
        """They were freed."""
        self.tracker.remove(self.kind, self.count)


_poisoned = False


@contextmanager
def poison() -> Iterator[None]:
    """Fill floating-point buffers with NaN when they are allocated and before they are freed: a double for tests."""
    global _poisoned
    before, _poisoned = _poisoned, True
    try:
        yield
    finally:
        _poisoned = before


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
        self._storage.resize_(self._bytes)
        if not self._shaped:
            # The stubs of torch lack the overload for untyped storages.
            self.tensor.set_(self._storage, 0, (self._numel,))  # type: ignore[call-overload]
            self._shaped = True
        self.allocated = True
        self._tracker.add(self._kind, self._bytes)
        if _poisoned and self.tensor.is_floating_point():
            self.tensor.fill_(float("nan"))

    def free(self) -> None:
        """Give the memory back; nothing happens if it is gone. The caller sees to it that nobody reads it any more."""
        if not self.allocated:
            return
        if _poisoned and self.tensor.is_floating_point():
            self.tensor.fill_(float("nan"))
        self._storage.resize_(0)
        self.allocated = False
        self._tracker.remove(self._kind, self._bytes)
        self._kind = self._usual_kind

    @property
    def address(self) -> int:
        """Where the memory is; 0 while it is gone."""
        return self._storage.data_ptr()

    def disown(self) -> torch.Tensor:
        """Hand the memory to the caller for good; the next `allocate` takes new memory in a new tensor."""
        given, self.tensor = self.tensor, torch.empty(0, dtype=self.tensor.dtype, device=self.tensor.device)
        self._storage, self._shaped = self.tensor.untyped_storage(), False
        self.allocated = False
        self._tracker.remove(self._kind, self._bytes)
        return given


VERSION = attrgetter("_version")
_NEXT = (1).__add__


def versions_of(leaves: Iterable[torch.Tensor]) -> list[int]:
    """The version counters of `leaves`."""
    return list(map(VERSION, leaves))


class Versions:
    """The version counters of the parameters that live in one buffer. [Note: versions]

    Attributes:
        known: what they are while the buffer is filled and nobody else writes; empty before it is.
    """

    def __init__(self, leaves: Sequence[torch.Tensor]) -> None:
        self._leaves = leaves
        self._saved: list[int] = []  # those that saved tensors of this content carry
        self.known: list[int] = []

    def ask(self) -> None:
        """The leaves show memory that stays: take their versions as they are."""
        self._saved = self.known = versions_of(self._leaves)

    def on_overwrite(self, indices: Collection[int]) -> None:
        """The places of these parameters will hold something else: saved views of them must be refused."""
        self.known = list(self.known)
        for i in indices:
            self.known[i] += 1
        torch.autograd.graph.increment_version([self._leaves[i] for i in indices])

    def on_free(self) -> None:
        """The buffer is about to be unreadable: saved views of it must be refused."""
        torch.autograd.graph.increment_version(self._leaves)

    def on_fill(self, *, changed: bool) -> None:
        """The buffer holds weights again; `changed` says that the shard was written to by other means than a leaf.

        A leaf that somebody else wrote to since the last fill keeps its version, too.
        """
        found = list(map(VERSION, self._leaves))
        if changed or not self.known:
            self._saved = self.known = found
            return
        at_rest = list(map(_NEXT, self.known))
        if found != at_rest:
            rows = zip(found, self._saved, at_rest, strict=True)
            self._saved = [saved if version == rest else version for version, saved, rest in rows]
        self.known = self._saved
        _torch.set_versions(tuple(self._leaves), tuple(self.known))
