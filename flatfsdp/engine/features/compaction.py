"""Memory of an accelerator that stays, apart from memory that comes and goes; and the latter in one piece.

[Note: compaction] torch's allocator takes memory from the device in segments of the sizes that are asked for first, and
joins free pieces only within a segment. What stays (shards, gradients until the optimizer's step, the optimizer's
states) is cut from segments in which something else has just been freed, and the rest of these fits nothing; and the
first step asks in an order that no later one repeats. So

- shards, and the reduced gradients of the first steps, are allocated on a stream on which nothing else is; they are
  used on others, in the order of computation;
- before an optimizer's first step, which makes its states, and again before the forward after it, what is cached is
  given back to the device; then what a step needs in addition to what is held is taken as one segment, and freed. All
  requests are cut from it from then on, and neighbors join again.

Twice in a training the host waits for the device, as it does for each segment that the first step takes; later steps
take none. With `expandable_segments` the allocator keeps free memory together by itself, and this changes little.

What a step needs is the most that was in use as units allocated memory in the first steps, without unsharded
parameters, which another stream has. Where it is more, the rest comes from segments as usual.
"""

from __future__ import annotations

import math
import weakref
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from ..base.events import Observer
from ..device.memory import MemoryTracker
from ..device.streams import Device, Stream
from ..guards.optimizer_hooks import is_at_work, looking, stepped_by
from ..runtime.model import Model

LEAST = 20 * 2**20  # bytes: smaller segments are what the allocator takes anyway, and smaller pieces fit little
_apart: weakref.WeakKeyDictionary[Any, Stream] = weakref.WeakKeyDictionary()


def keep_apart(tracker: MemoryTracker, device: Device) -> None:
    """Let units that count in `tracker` allocate what stays on a stream of its own, if `device` has an allocator."""
    if _has_allocator(device):
        if device.module not in _apart:
            _apart[device.module] = device.new_stream("kept memory")
        tracker.apart = partial(_new_on, _apart[device.module])


def _has_allocator(device: Device) -> bool:
    """Whether memory of `device` comes from torch's own allocator; others have no figures, or other rules."""
    backend = getattr(device.module, "get_allocator_backend", None)
    return backend is not None and backend() == "native"


def _new_on(stream: Stream, like: torch.Tensor, numel: int) -> torch.Tensor:
    with stream.running():
        return like.new_empty(numel)


class Compaction(Observer):
    """Observes one model from its first forward in training to the one after an optimizer's first step."""

    def __init__(self, model: Model) -> None:
        self._model = weakref.ref(model)
        self._held: int | None = None  # bytes in use before the first forward
        self._most = 0  # in use since then
        self._stepped = False

    def training_begins(self, units: Any) -> None:
        """Begin to measure, or take what a step needs."""
        if (model := self._model()) is None:
            return
        tracker = model.resources.tracker
        if self._held is None:
            self._held = self._most = _in_use(model)
            looking.add(weakref.ref(self, looking.discard))
            tracker.advise, tracker.advised_from = self._sample, 0
        elif self._stepped:
            tracker.advise, tracker.advised_from, tracker.apart = id, math.inf, torch.Tensor.new_empty
            looking.discard(weakref.ref(self))
            model.observers.remove(self)
            _compact(model, self._most - self._held)

    def optimizer_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """Compact before the optimizer makes its states, which then lie one behind the other."""
        model, in_backward = self._model(), is_at_work(optimizer)
        if model is not None and not self._stepped and (in_backward or model in stepped_by(optimizer)):
            self._stepped = True
            if not in_backward:
                _compact(model, self._most - (self._held or 0))

    def _sample(self, tensor: torch.Tensor) -> None:
        if (model := self._model()) is not None:
            self._most = max(self._most, _in_use(model))


def _module_of(model: Model) -> Any:
    return model.resources.device.module


def _in_use(model: Model) -> int:
    device, tracker = model.resources.device, model.resources.tracker
    unsharded = 0 if model.resources.streams.unshard.is_callers else tracker.live["unsharded"]
    return int(_module_of(model).memory_allocated(device.device)) - unsharded


def _compact(model: Model, needed: int) -> None:
    """Give back what is cached, and let the allocator have `needed` bytes in large pieces, if the device has them."""
    device, module = model.resources.device, _module_of(model)
    if getattr(module, "is_current_stream_capturing", bool)():
        return
    module.empty_cache()
    blocks = (block for segment in module.memory_snapshot() for block in segment["blocks"])
    free = sum(block["size"] for block in blocks if block["state"] == "inactive" and block["size"] > LEAST)
    if needed - free > LEAST:
        with suppress(torch.OutOfMemoryError):
            torch.empty(needed - free, dtype=torch.uint8, device=device.device)


def attach_compaction(model: Model) -> None:
    """Let `model`, whose outermost unit is new, compact memory in its first steps, if its device has an allocator."""
    if _has_allocator(model.resources.device):
        model.observers.add(Compaction(model))
