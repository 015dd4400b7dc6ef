"""Gradients in flight: reduce-scatter along the shard axis, then all-reduce along the replicate axis.

[Note: reduction stages] The second stage is launched when the first has been waited for, which every rank does at the
same point of the order. On an axis of one rank, the all-reduce is the first and only one. The input of a reduction is
held until its first stage has finished, its result until the result is requested. Between the stages an earlier partial
sum is added, on the stream of the first; a request of the result waits for that addition, even if no stage follows it.

[Note: downloads] The reduced gradients of an offloaded handle are copied to page-locked host memory on the same stream,
concurrently with the rest of the backward; the host waits once, for all of them, when the backward ends. A copy to
pageable memory would block the host where it is issued, so it waits for the end of the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from ..comm.tensor_groups import TensorGroup
from ..comm.transport import Reducer
from ..device.memory import FlatBuffer, MemoryTracker, free_held
from ..device.streams import DONE, PendingWork, Stream, Work
from .flat_param import FlatParamHandle


class Carried(Protocol):
    """Tensors that reductions of one flat parameter leave to later ones: the errors of an encoding in few bits, or sums
    of some microbatches."""

    def joining(
        self, inputs: Sequence[ReductionInput], scatter: Reducer, replicate: Reducer | None
    ) -> tuple[Reducer, Reducer | None]:
        """The reducers of both stages of a reduction of `inputs`, which all carry such an object; this one is that of
        the first."""

    def move_to_tracker(self, tracker: MemoryTracker) -> None: ...


@dataclass(eq=False)
class ReductionInput:
    """One handle's gradients in a reduction.

    Attributes:
        buffer: the input: shape (padded_numel,), reduce dtype. It belongs to the reduction until `free_buffer`
            has given it back; then it is None.
        segments: the parts of the buffer that are reduced, while it exists. [Note: pieces]
        shares_unsharded_buffer: whether the buffer is that of the unsharded parameters.
        scale: the factor that the result must still be multiplied by.
        earlier: a partial sum that is added between the stages.
        hook: runs on the sum of both, before it is scaled; returns a work to wait for, if any.
        downloads: whether the result is copied to the host, which waits for nothing else.
        carried: what earlier reductions have left to it; None for nothing but `earlier`.
        reduction: the exchange that includes it; None until that is issued.
        result: this rank's shard of the sum: shape (shard_numel,), reduce dtype; undefined until `reduction` finishes.
        in_place: whether the result lies in the buffer; bytes: its size otherwise.
        downloaded: the scaled result in host memory, in the optimizer's dtype; None if it is not copied there.
    """

    handle: FlatParamHandle
    buffer: FlatBuffer | None
    segments: TensorGroup
    free_buffer: Callable[[FlatBuffer], Any]
    shares_unsharded_buffer: bool
    scale: float
    earlier: torch.Tensor | None
    hook: Callable[[torch.Tensor], Work | None] | None
    downloads: bool
    carried: Carried | None = None
    reduction: Reduction | None = None
    result: torch.Tensor = field(init=False)
    in_place: bool = False
    bytes: int = 0
    downloaded: torch.Tensor | None = None
    _downloading: PendingWork = DONE

    @property
    def input_bytes(self) -> int:
        """Bytes that are held for the first stage."""
        held = self.buffer is not None and not self.in_place
        return self.handle.layout.padded_numel * self.result.element_size() if held else 0

    def release_buffer(self) -> None:
        """Free the input, which is not read any more."""
        if self.buffer is not None and not self.in_place:
            self.free_buffer(self.buffer)
            self.buffer = None
            self.segments = TensorGroup()  # of memory that may have another owner

    def finish(self, stream: Stream) -> None:
        """Run the hook on the sum, and start the result's copy to the host. [Note: downloads]"""
        if self.hook is not None:
            hook, self.hook = self.hook, None
            with torch.no_grad():
                work = hook(self.result)
            if work is not None:
                work.wait()
            stream.follow_compute()
        if self.downloads and stream.is_stream:
            with stream.running():
                if self.scale != 1.0:
                    self.result.mul_(self.scale)
                    self.scale = 1.0
                result = self.result.to(self.handle.precision.grad)
            self.downloaded, self._downloading = stream.download(result)

    def in_order(self) -> torch.Tensor:
        """The result of a finished reduction; orders the caller after its scaling, if that belongs to a download."""
        if not self._downloading.done:
            self._downloading.wait()
        return self.result

    def wait(self) -> torch.Tensor:
        """The summed and scaled gradient of the shard. Collective over the replicate axis."""
        assert self.reduction is not None
        if self.reduction.inputs:
            self.reduction.finish()
        if not self._downloading.done:
            self._downloading.wait()
        if self.buffer is not None:  # whose memory is the result
            self.buffer.disown()
            self.buffer = None
        self.handle.tracker.remove("reduced", self.bytes)
        if self.scale != 1.0:
            self.result.mul_(self.scale)
            self.scale = 1.0
        return self.result

    def discard(self) -> None:
        """Wait for the stages that were issued, and drop the result."""
        self.hook = None
        self.downloads = False
        if self.reduction is None:  # another input of it failed
            self.release_buffer()
            return
        self.reduction.replicate = None
        self.wait()


class Reduction:
    """One exchange of gradients: those of one handle, or coalesced those of several small ones. [Note: coalescing]

    Attributes:
        inputs: the gradients; empty when they have been reduced.
        replicate: the reducer for the second stage until that is issued; None if there is no stage left to issue.
        input_is_released: the first stage was waited for.
        advances_in_waits: whether that stage progresses only while ranks wait, so that a later wait hides nothing.
    """

    def __init__(
        self,
        inputs: Sequence[ReductionInput],
        scatter: Reducer,
        replicate: Reducer | None,
        stream: Stream,
        across: Stream,
        *,
        coalesced: bool = False,
    ) -> None:
        """Issue the first stage. Collective over its axis; `across` is the replicate axis's stream."""
        self.inputs = inputs
        first = inputs[0]
        if first.carried is not None:
            scatter, replicate = first.carried.joining(inputs, scatter, replicate)
        self.replicate = replicate
        self._stream = stream  # of the stage that was issued last
        self._across = across
        self._first = self._added = self._second = DONE
        self.input_is_released = False
        assert first.buffer is not None
        full = first.buffer.tensor
        sizes = [each.handle.layout.shard_numel for each in inputs] if coalesced else []
        numel = sum(sizes) if coalesced else first.handle.layout.shard_numel
        first.in_place = not coalesced and first.handle.is_unsharded_at_rest
        if first.in_place:
            self._result = full
        else:
            try:
                self._result = first.handle.tracker.apart(full, numel)
            except torch.OutOfMemoryError:
                free_held()
                self._result = full.new_empty(numel)
        if coalesced:
            for each, own in zip(inputs, self._result.split(sizes), strict=True):
                each.result = own.data  # a version counter of its own: writing to one gradient is not writing to all
        else:
            first.result = self._result
        tracker = first.handle.tracker
        if self._result.nbytes >= tracker.advised_from and self._result is not full:
            tracker.advise(self._result)
        for each in inputs:  # before anything can fail: allocated results are found and discarded through the inputs
            each.reduction = self
            each.bytes = 0 if each.in_place else each.result.nbytes
            each.handle.tracker.add("reduced", each.bytes)
        if stream.is_stream:
            stream.follow_compute()
        if first.in_place:
            self._first = self._all_reduce()
        elif coalesced or first.segments[1:]:
            segments = TensorGroup.join([each.segments for each in inputs]) if coalesced else first.segments
            self._first = scatter.reduce_scatter_coalesced(self._result, segments, stream)
            if first.handle.is_unsharded_at_rest:
                self._first.wait()  # a copy, without a message
                self._first = self._all_reduce()
        else:
            self._first = scatter.reduce_scatter_base(self._result, first.segments[0], stream)
        self.advances_in_waits = self._first.advances_in_waits

    @property
    def is_under_way(self) -> bool:
        """Whether a second stage must still be waited for."""
        return self.replicate is not None or not (self._added.done and self._second.done)

    def release_input(self) -> None:
        """Wait for the first stage, free its input and issue the second. Collective over the replicate axis."""
        if self.input_is_released:
            return
        self.input_is_released = True
        first, self._first = self._first, DONE  # one that fails is not waited for again
        first.wait()
        self._second = self._all_reduce()
        for each in self.inputs:
            each.release_buffer()

    def _all_reduce(self) -> PendingWork:
        """Sum the result and the earlier partial sum over replicas, once."""
        added: list[torch.Tensor] = []
        for each in self.inputs:
            if each.earlier is not None:
                with self._stream.running():
                    each.result.add_(each.earlier)
                added.append(each.earlier)
                each.earlier = None
        if added:
            self._added = self._stream.pending(self._result, *added)
        replicate, self.replicate = self.replicate, None
        if replicate is None:
            return DONE
        before, self._stream = self._stream, self._across
        self._stream.await_mark(before.mark())
        return replicate.all_reduce(self._result, self._stream)

    def finish(self) -> None:
        """Wait for both stages, and run the hooks. Collective over the replicate axis, and over the axes of hooks."""
        if not self.inputs:
            return
        if not self.input_is_released:
            self.release_input()
        if not self._added.done:
            self._added.wait()
        second, self._second = self._second, DONE
        if not second.done:
            second.wait()
        if len(self.inputs) > 1 and not any(each.downloads for each in self.inputs):
            scales = {each.scale for each in self.inputs}
            if len(scales) == 1 and scales != {1.0}:
                self._result.mul_(scales.pop())
                for each in self.inputs:
                    each.scale = 1.0
        for each in self.inputs:
            if each.hook is not None or each.downloads:
                each.finish(self._stream)
        self.inputs = ()  # they refer to this object: in a cycle, gradients would live until the collector runs


def release_inputs(inputs: Iterable[ReductionInput]) -> None:
    """Wait for the first stages, to free their inputs."""
    for each in inputs:
        if each.reduction is not None:
            each.reduction.release_input()
