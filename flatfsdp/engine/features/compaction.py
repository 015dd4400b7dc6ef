"""Memory of an accelerator that stays, apart from memory that comes and goes; and the latter in one piece.

[Note: compaction] torch's allocator takes memory from the device in segments of the sizes that are asked for first, and
joins free pieces only within a segment. What stays (shards, gradients until the optimizer's step, the optimizer's
states) is cut from segments in which something else has just been freed, and the rest of these fits nothing; and the
first step asks in an order that no later one repeats. So

- shards, and the reduced gradients of the first steps, are allocated on a stream on which nothing else is; they are
  used on others, in the order of computation;
- before an optimizer's first step, which makes its states, and again before the forward after it, what is cached is
  given back to the device; then what a step needs in addition to what is held is taken as one segment, and freed. All
  requests are cut from it from then on, and neighbors join again;
- a request that finds no piece gets a segment larger than itself (10 MiB or more are rounded up to 2, less comes from
  20), which serves later ones only if they are no larger. So the shards of all units that a wrapper's policy makes
  share one; and those for unsharded parameters are taken for the sizes that were the most at one time in the first
  step, the largest first;
- if the largest request of a step is for the outermost unit's gradients, at the end of a backward, and little more than
  they need is free then, that is in pieces, between the gradients of other units. So all unsharded parameters get one
  segment, which is large enough for these gradients, too ([Note: borrowed memory]).

Twice in a training the host waits for the device, as it does for each segment that the first step takes; later steps
take none. With `expandable_segments` the allocator keeps free memory together by itself; nothing of this is done.

What a step needs is the most that was in use as units allocated memory in the first steps, without unsharded
parameters, which another stream has. Where it is more, the rest comes from segments as usual. An optimizer that steps
in the backward makes its states while this is measured, so the next step is measured instead. A program that frees
gradients between forward and backward never comes to the second of these points: its gradients stay apart.

[Note: kept streams] To the allocator, work that allocates on a stream is in order with all earlier work of that stream.
Memory of a kept stream is used on the caller's, so each stream of a caller, which has that order, has a kept one of its
own; and no kernel may run there, not even one that fills new memory (`torch.use_deterministic_algorithms`). torch takes
streams in turn from pools of `POOL`, so that others would get the same one. The pools are by priority, and `PRIORITY`
is one that nobody else asks for: the engine takes 0 and -1, NCCL 0 or the highest that torch has, -3. Where a device
has fewer, torch maps it to one that others use, and nothing is kept apart.
"""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import ModuleType
from typing import Any

import torch

from ...api import check_bool
from ..base.events import Observer
from ..device.memory import MemoryTracker
from ..device.streams import Device
from ..guards.optimizer_hooks import handles_of, is_at_work, looking, stepped_by
from ..runtime.model import Model
from .borrowed_memory import BorrowedBuffer, begins_late, borrowed_buffer

SPARE = 2  # as many times a request must be free, if a piece that is large enough is to be expected
LEAST = 20 * 2**20  # bytes: smaller segments are what the allocator takes anyway, and smaller pieces fit little
POOL = 32
PRIORITY = -2  # means nothing, as no kernel runs. [Note: kept streams]
# By the module of a device: its index and a stream of a caller to a stream of torch; None where others might get that.
_kept: weakref.WeakKeyDictionary[Any, dict[tuple[int | None, Any], Any]] = weakref.WeakKeyDictionary()
_wanted = True


def compact_device_memory(enabled: bool = True) -> None:
    """Choose whether models on CUDA rearrange the memory of their device in the first steps of training, so that
    torch's allocator reserves little more than what is in use; by default they do.

    Shards and the first reduced gradients are then allocated on a stream of their own. Before an optimizer's first step
    and before the forward after it, all cached memory of the process is given back to its devices
    (`torch.cuda.empty_cache()`), and what a step needs in addition to what is held is taken from the device as one
    segment, which stays in the cache. The effect was predicted by a model of the allocator; this was not yet run on a
    GPU. Results are the same.

    Turn it off if several processes share a GPU, or if other code in the process, such as inference between steps,
    relies on `torch.cuda.empty_cache()`: a segment is given back only if nothing in it is in use, and one large segment
    nearly always is. With `expandable_segments` in `PYTORCH_ALLOC_CONF` nothing is rearranged; with `max_split_size_mb`
    no segment is taken.

    Call it before models are wrapped: those that exist keep what was chosen for them. Not collective.

    Args:
        enabled: False to leave everything to the allocator.

    Raises:
        ConfigTypeError: `enabled` is not a bool.

    Example:
        >>> import flatfsdp
        >>> flatfsdp.compact_device_memory(False)
        >>> flatfsdp.compact_device_memory()  # back to the default
    """
    global _wanted
    check_bool("compact_device_memory: enabled", enabled)
    _wanted = enabled


def keep_apart(tracker: MemoryTracker, device: Device) -> None:
    """Let units that count in `tracker` allocate what stays on a stream of its own, if `device` has an allocator."""
    if _rearranges(device):
        tracker.apart = partial(_new_apart, device)


def _rearranges(device: Device) -> bool:
    """Whether memory of `device` comes from torch's own allocator for CUDA, which does not join segments by itself, and
    the user has not turned it off. Others have no figures, or other rules."""
    backend = getattr(device.module, "get_allocator_backend", None)
    is_stand_in = not isinstance(device.module, ModuleType)
    if not _wanted or backend is None or not (device.device.type == "cuda" or is_stand_in):
        return False
    return backend() == "native" and "expandable_segments:true" not in _settings()


def _settings() -> str:
    """The settings of torch's allocator in the environment."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
    return next(filter(None, map(os.environ.get, names)), "").lower().replace(" ", "")


def _is_capturing(device: Device) -> bool:
    return bool(getattr(device.module, "is_current_stream_capturing", bool)())


def _kept_stream(device: Device) -> Any:
    """The stream for what stays of the caller's allocations; None where others might get it. [Note: kept streams]"""
    module: Any = device.module
    kept = _kept.setdefault(module, {})
    key = device.device.index, device.current_stream()
    if key not in kept:
        stream = module.Stream(device.device, priority=PRIORITY) if len(kept) < POOL else None
        kept[key] = stream if getattr(stream, "priority", None) == PRIORITY else None
    return kept[key]


def _new_apart(device: Device, like: torch.Tensor, numel: int) -> torch.Tensor:
    """`like.new_empty(numel)`, if possible in memory of a kept stream."""
    if like.device != device.device or _is_capturing(device) or (stream := _kept_stream(device)) is None:
        return like.new_empty(numel)
    made = like.new_empty(0)
    storage = made.untyped_storage()
    try:
        with device.running_on(stream):
            storage.resize_(numel * made.element_size())
    except torch.OutOfMemoryError:  # the caller's stream may have free pieces
        return like.new_empty(numel)
    # The stubs of torch lack the overload for untyped storages.
    return made.set_(storage, 0, (numel,))  # type: ignore[call-overload]


class Compaction(Observer):
    """Observes one model from its first forward in training to the one after an optimizer's first step."""

    def __init__(self, model: Model) -> None:
        self._model = weakref.ref(model)
        self._held: int | None = None  # bytes in use before the first forward that is measured
        self._most = 0  # in use since then
        self._largest = 0  # bytes of the largest buffer
        self._slots: BorrowedBuffer | None = None  # late ones of the outermost unit
        self._borrows = False  # whether these should borrow memory of gathers
        self._most_besides = 0  # in use without them
        self._gathered: list[int] = []  # the sizes of unsharded parameters when these were the most
        self._stepped = False
        self._made_in_backward = False  # whether an optimizer has its states from a backward

    def training_begins(self, units: Any) -> None:
        """Begin to measure, or take what a step needs."""
        if (model := self._model()) is None:
            return
        tracker = model.resources.tracker
        if self._stepped:
            tracker.advise, tracker.advised_from = id, math.inf
            looking.discard(self)
            if _has_gradients(model):  # their memory would serve nothing if later ones were not allocated apart
                return
            tracker.apart = torch.Tensor.new_empty
            model.observers.remove(self)
            _compact(model, self._needed)
            _make_room_for_gathers(model, self._gathered, self._slots if self._borrows else None)
        elif self._held is None:
            self._held = self._most = self._most_besides = _in_use(model)
            self._slots = self._slots or borrowed_buffer(model.outermost)
            looking.add(self)
            tracker.advise, tracker.advised_from = self._sample, 0

    def optimizer_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """Compact before the optimizer makes its states, which then lie one behind the other."""
        if (model := self._model()) is None or self._stepped or self._held is None:
            return
        if not is_at_work(optimizer):
            if model in stepped_by(optimizer):
                self._stepped = True
                _compact(model, self._needed)
        elif any(each is model for each, _ in handles_of(optimizer)):
            self._stepped = self._made_in_backward
            if not self._stepped:
                self._made_in_backward, self._held = True, None

    @property
    def _needed(self) -> int:
        """Bytes that a step needs in addition to what is held, without those of gathers."""
        return (self._most_besides if self._borrows else self._most) - (self._held or 0)

    def _sample(self, tensor: torch.Tensor) -> None:
        if (model := self._model()) is None:
            return
        in_use, size = _in_use(model), tensor.nbytes
        self._largest = max(self._largest, size)
        self._most = max(self._most, in_use)
        slots = self._slots
        if slots is not None and tensor is slots.tensor and begins_late(model.outermost):
            in_use -= size
            self._borrows = size == self._largest and self._most - in_use < SPARE * size
        self._most_besides = max(self._most_besides, in_use)
        if model.resources.tracker.live["unsharded"] > sum(self._gathered):
            self._gathered = _gathered(model)


def _has_gradients(model: Model) -> bool:
    device = model.resources.device.device
    holders = (each for unit in model.units for handle in unit.handles for each in handle.face.holders)
    return any(each.grad is not None and each.grad.device == device for each in holders)


def _in_use(model: Model) -> int:
    device, tracker = model.resources.device, model.resources.tracker
    module: Any = device.module
    unsharded = 0 if model.resources.streams.unshard.is_callers else tracker.live["unsharded"]
    return int(module.memory_allocated(device.device)) - unsharded


def _compact(model: Model, needed: int) -> None:
    """Give back what is cached, and let the allocator have `needed` bytes in large pieces, if the device has them."""
    device = model.resources.device
    module: Any = device.module
    if _is_capturing(device):
        return
    module.empty_cache()
    if "max_split_size_mb" in _settings():  # nothing may be cut from a larger segment
        return
    lacking = needed - _free_in_large_pieces(device)
    if lacking > LEAST:
        _take(device, lacking)


def _take(device: Device, *sizes: int) -> None:
    """Let the allocator have a segment of each of `sizes` on the current stream, if the device has the memory."""
    module: Any = device.module
    if sum(sizes) <= module.mem_get_info(device.device)[0]:  # else tools that watch for lack of memory report it
        with suppress(torch.OutOfMemoryError):
            made = [torch.empty(0, dtype=torch.uint8, device=device.device) for _ in sizes]
            for each, size in zip(made, sizes, strict=True):
                each.untyped_storage().resize_(size)  # runs no kernel. [Note: kept streams]


def _gathered(model: Model) -> list[int]:
    """The sizes of unsharded parameters that have memory."""
    buffers = (handle.buffer(handle.precision.compute) for unit in model.units for handle in unit.handles)
    return [buffer.tensor.nbytes for buffer in buffers if buffer is not None and buffer.allocated]


def _make_room_for_gathers(model: Model, sizes: list[int], borrower: BorrowedBuffer | None) -> None:
    """Let the allocator have what gathers need, of `sizes`, the largest first: smaller units that come first are then
    cut from pieces in which larger ones have room, too. With a `borrower`, it is one piece in which that has room."""
    device, stream = model.resources.device, model.resources.streams.unshard
    if stream.is_callers or _gathered(model):
        return
    sizes = sorted(sizes, reverse=True)
    if borrower is not None:
        sizes, borrower.borrows = [max(sum(sizes), borrower.tensor.nbytes)], True
    with stream.running():
        _take(device, *sizes)


def make_room_for_shards(device: Device, count: Callable[[], int]) -> None:
    """Let the allocator have so many bytes in one piece for the shards of the units that are made next: each one alone
    would take more than it needs. `count` is called only where that is done."""
    if not _rearranges(device) or _is_capturing(device):
        return
    module: Any = device.module
    needed = count()
    has_room = LEAST < needed < module.mem_get_info(device.device)[0] // 2
    if has_room and (stream := _kept_stream(device)) is not None:
        with device.running_on(stream):
            _take(device, needed)


def _is_private(segment: dict[str, Any]) -> bool:
    """Whether a segment is of the pool of a CUDA graph, or of a user's."""
    return tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0)


def _free_in_large_pieces(device: Device) -> int:
    """Cached bytes from which requests of the caller's stream are cut."""
    module: Any = device.module
    try:
        segments = module.memory_snapshot(include_traces=False)
    except TypeError:  # an older torch
        segments = module.memory_snapshot()
    here = device.device.index or 0, device.current_stream().cuda_stream
    found = [each for each in segments if (each["device"], each["stream"]) == here and not _is_private(each)]
    free = [block["size"] for each in found for block in each["blocks"] if block["state"] == "inactive"]
    return sum(size for size in free if size > LEAST)


def attach_compaction(model: Model) -> None:
    """Let `model`, whose outermost unit is new, compact memory in its first steps, if its device has an allocator."""
    if _rearranges(model.resources.device):
        model.observers.add(Compaction(model))
