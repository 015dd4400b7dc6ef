"""Gradients in flight: reduce-scatter along the shard axis, then all-reduce along the replicate axis.

[Note: reduction stages] The second stage is launched when the first has been waited for, which every rank does at the
same point of the order. Where the shard is the whole, the all-reduce is the first and only one. What a reduction reads
is held until its first stage is over, what it brings until somebody asks for it.

[Note: downloads] What an offloaded handle's gradients bring goes on to page-locked host memory on the same lane, beside
the rest of the backward; the host waits once, for all of them, when the backward ends. A copy to memory that is not
page-locked would keep the host where it is issued, so that waits for the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..comm.comm_hook import to_wait_for
from ..comm.transport import Reducer, Transport
from ..device.memory import FlatBuffer
from ..device.streams import DONE, PendingWork, Stream
from .flat_param import FlatParamHandle


class ReductionInput:
    """One handle's gradients in a reduction.

    Attributes:
        buffer: what is reduced: shape (padded_numel,), reduce dtype; None when it has been given back.
        reduction: what the part is in; None until that is issued.
        bytes: of the result; 0 where it lies in the buffer.
        result: this rank's shard of the sum: shape (shard_numel,), reduce dtype; undefined until `reduction` is over.
        scale: what the result is to be multiplied by still.
        shares_unsharded_buffer: whether the buffer is the parameters' place.
        downloads: whether the result is sent on to the host.
        downloaded: the scaled result in host memory, in the optimizer's dtype; None where it is not sent there.
    """

    result: torch.Tensor

    def __init__(
        self,
        handle: FlatParamHandle,
        buffer: FlatBuffer,
        give_back: Callable[[FlatBuffer], Any],
        *,
        scale: float,
        earlier: torch.Tensor | None,
        hook: Callable[[torch.Tensor], Any] | None,
        download: bool,
        shares_unsharded_buffer: bool,
    ) -> None:
        """`buffer` belongs to the reduction from now on, until it is given back. `earlier` is added between the stages;
        `hook` sees the sum of both, before it is multiplied by `scale`. `download`: it is all that the host awaits.
        `shares_unsharded_buffer`: the buffer is the parameters' place."""
        self.handle = handle
        self.reduction: Reduction | None = None
        self.buffer: FlatBuffer | None = buffer
        self.dtype = buffer.tensor.dtype
        self.in_place = False  # the result lies in the buffer
        self.bytes = 0
        self.earlier = earlier
        self.hook = hook
        self.shares_unsharded_buffer = shares_unsharded_buffer
        self.downloaded: torch.Tensor | None = None
        self._free_buffer = give_back
        self.scale = scale
        self.downloads = download
        self._downloading = DONE

    @property
    def input_bytes(self) -> int:
        """Bytes that are held for the first stage."""
        held = self.buffer is not None and not self.in_place
        return self.handle.layout.padded_numel * self.result.element_size() if held else 0

    @property
    def can_finish_later(self) -> bool:
        """Whether the result may come while nobody waits for it: one exchange brings it, from memory of its own."""
        if (
            self.reduction is None
            or self.reduction.has_more_to_issue
            or self.handle.is_unsharded_at_rest
            or self.buffer is None
        ):
            return False
        return not (self.shares_unsharded_buffer or self.hook is not None or self.downloads)

    def release_buffer(self) -> None:
        """Nobody reads the input any more."""
        if self.buffer is not None and not self.in_place:
            self._free_buffer(self.buffer)
            self.buffer = None

    def release_input(self) -> None:
        """Wait for the first stage, whose input is in the way."""
        if self.reduction is not None:
            self.reduction.release_input()

    def finish(self, stream: Stream) -> None:
        """Run the hook on the sum, and send the result on its way to the host. [Note: downloads]"""
        if self.hook is not None:
            hook, self.hook = self.hook, None
            with torch.no_grad():
                work = to_wait_for(hook(self.result), "an all-reduce hook", result=self.result)
            if work is not None:
                work.wait()
            stream.follow_compute()
        if self.downloads and stream.is_stream:
            with stream.running():
                if self.scale != 1.0:
                    self._apply_scale()
                result = self.result.to(self.handle.precision.grad)
            self.downloaded, self._downloading = stream.download(result)

    def _apply_scale(self) -> None:
        self.result.mul_(self.scale)
        self.scale = 1.0

    def wait(self) -> torch.Tensor:
        """The summed and scaled gradient of the shard. Collective over the replicate axis."""
        assert self.reduction is not None
        self.reduction.finish()
        self._downloading.wait()
        if self.buffer is not None:  # whose memory is the result
            self.buffer.disown()
            self.buffer = None
        self.handle.tracker.remove("reduced", self.bytes)
        if self.scale != 1.0:
            self._apply_scale()
        return self.result

    def discard(self) -> None:
        """Wait for what was issued; nobody wants the result."""
        self.hook = None
        self.downloads = False
        if self.reduction is None:  # another part of it failed
            self.release_buffer()
            return
        self.reduction.issue_no_more()
        self.wait()


class Reduction:
    """One exchange of gradients: those of one handle.

    Attributes:
        parts: the gradients, none when they have been reduced.
        input_is_released: the first stage was waited for.
    """

    def __init__(
        self,
        parts: Sequence[ReductionInput],
        scatter: Reducer,
        replicate: Reducer | None,
        stream: Stream,
        across: Stream,
    ) -> None:
        """Issue the first stage. Collective over its axis; `across` is the replicate axis's lane."""
        self.parts = parts
        self._replicate = replicate
        self._stream = stream  # of the stage that was issued last
        self._across = across
        self._first = self._second = DONE
        self.input_is_released = False
        self._result = self._place_result()
        for part in parts:  # before anything may fail: what was made is found and discarded by its parts
            part.reduction = self
            part.bytes = 0 if part.in_place else part.handle.layout.shard_numel * part.dtype.itemsize
            part.handle.tracker.add("reduced", part.bytes)
        stream.follow_compute()
        self._first = self._start(scatter)

    def _place_result(self) -> torch.Tensor:
        """Where the first stage brings its result: in place where the shard is the whole."""
        (part,) = self.parts
        assert part.buffer is not None
        full = part.buffer.tensor
        part.in_place = part.handle.is_unsharded_at_rest
        part.result = full if part.in_place else full.new_empty(part.handle.layout.shard_numel)
        return part.result

    def _start(self, scatter: Reducer) -> PendingWork:
        (part,) = self.parts
        assert part.buffer is not None
        if part.in_place:
            return self._all_reduce()
        return scatter.reduce_scatter_base(self._result, part.buffer.tensor, self._stream)

    @property
    def input_bytes(self) -> int:
        """Bytes that the first stage reads and that are held for it."""
        return sum(part.input_bytes for part in self.parts)

    @property
    def is_under_way(self) -> bool:
        """Whether a second stage is to be waited for."""
        return self._replicate is not None or not self._second.done

    @property
    def has_more_to_issue(self) -> bool:
        """Whether a second stage follows that was not issued."""
        return self._replicate is not None

    def release_input(self) -> None:
        """Wait for the first stage, free its input and issue the second. Collective over the replicate axis."""
        if self.input_is_released:
            return
        self.input_is_released = True
        first, self._first = self._first, DONE  # one that fails is not waited for again
        first.wait()
        self._second = self._all_reduce()
        for part in self.parts:
            part.release_buffer()

    def _all_reduce(self) -> PendingWork:
        """Sum the result and what came earlier over replicas, once."""
        for part in self.parts:
            if part.earlier is not None:
                with self._stream.running():
                    part.result.add_(part.earlier)
                part.earlier = None
        replicate, self._replicate = self._replicate, None
        if replicate is None:
            return DONE
        before, self._stream = self._stream, self._across
        self._stream.await_mark(before.mark())
        return replicate.all_reduce(self._result, self._stream)

    def _scale(self) -> None:
        """The sum is there: scale it for all parts, if that can be done at once."""

    def issue_no_more(self) -> None:
        """Nobody wants the sum over replicas any more."""
        self._replicate = None

    def finish(self) -> None:
        """Wait for both stages, and run the hooks. Collective over the replicate axis, and over what hooks use."""
        if not self.parts:
            return
        if not self.input_is_released:
            self.release_input()
        second, self._second = self._second, DONE
        second.wait()
        self._scale()
        for part in self.parts:
            part.finish(self._stream)
        self.parts = ()  # which know their reduction: in a circle, gradients would live until the collector comes


class CoalescedReduction(Reduction):
    """One exchange of the gradients of several small handles. [Note: joining]"""

    def __init__(
        self,
        parts: Sequence[ReductionInput],
        transport: Transport,
        replicate: Reducer | None,
        stream: Stream,
        across: Stream,
    ) -> None:
        """Issue the first stage, over the axis of `transport`. Collective."""
        self._transport = transport
        super().__init__(parts, transport, replicate, stream, across)

    def _place_result(self) -> torch.Tensor:
        sizes = [part.handle.layout.shard_numel for part in self.parts]
        result = self._fulls()[0].new_empty(sum(sizes))
        for part, piece in zip(self.parts, result.split(sizes), strict=True):
            part.result = piece.data  # a version counter of its own: writing to one gradient is not writing to all
        return result

    def _start(self, scatter: Reducer) -> PendingWork:
        arriving = self._transport.reduce_scatter_coalesced(self._result, self._fulls(), self._stream)
        if not self.parts[0].handle.is_unsharded_at_rest:
            return arriving
        arriving.wait()  # a copy, no message
        return self._all_reduce()

    def _scale(self) -> None:
        scales = {part.scale for part in self.parts}
        if len(scales) == 1 and not any(part.downloads for part in self.parts):
            self._result.mul_(scales.pop())
            for part in self.parts:
                part.scale = 1.0

    def _fulls(self) -> list[torch.Tensor]:
        return [part.buffer.tensor for part in self.parts if part.buffer is not None]
