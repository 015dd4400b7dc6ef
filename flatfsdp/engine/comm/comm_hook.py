"""User-defined communication hooks that replace reductions.

[Note: communication hooks] A hook does the reduction over the ranks of its unit's process group, including the scaling.
If these ranks hold shards, it replaces the reduce-scatter: `hook(state, grad, shard)`. If each rank holds the complete
gradient, it replaces the all-reduce: `hook(state, grad)`. For hybrid strategies, the engine then takes the mean of the
hook's results over the replicas.

A hook may keep the tensors that it is given, and may set their `.data` to a tensor of any dtype (torch's compress hooks
do; the result is cast to the reduce dtype). So these tensors are the hook's own, over memory that is never resized, and
gradients of units with a hook never reuse a parameter's memory. A gradient of several segments is passed to the hook as
one segment: a copy that has each rank's pieces of all segments back to back (`CommStats.staged` counts the copy).

A hook communicates over the user's groups, in the order of reductions, which interleaves with gathers differently on
different ranks ([Note: backward order]). So a model with a hook gathers over the communicators made for reductions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...errors import UsageError, fail, shown
from ..config.precision import gradient_scaling
from ..config.unit_options import CommHook
from ..device.streams import Device, PendingWork, Stream
from .axes import ProcessGroups
from .error_feedback import Residuals
from .pieces import rows_of
from .transport import Reducer, Transport


class HookReducer:
    """Reductions by a hook instead of by a transport. [Note: communication hooks]"""

    def __init__(self, hook: CommHook, inner: Transport, *, replicas: int) -> None:
        """`inner`: the transport that provides device and statistics. Results are later averaged over `replicas`."""
        self._hook = hook
        self._device: Device = inner.device
        self._comm_stats, self._tracker = inner.comm_stats, inner.tracker
        self._world = inner.group.size
        self._replicas = replicas

    def reduce_scatter_base(self, output: torch.Tensor, full: torch.Tensor, stream: Stream) -> PendingWork:
        """Let the hook fill `output`, this rank's shard, from `full`. Collective over the groups that the hook uses."""
        return self._run(stream, full, output)

    def reduce_scatter_coalesced(
        self, output: torch.Tensor, fulls: Sequence[torch.Tensor], stream: Stream
    ) -> PendingWork:
        """Let the hook fill `output`, this rank's pieces of `fulls` back to back, from a copy of `fulls` in which the
        pieces of every rank are contiguous. Collective over the groups that the hook uses."""
        if len(fulls) == 1:
            return self._run(stream, fulls[0], output)
        with stream.running():
            rows = rows_of(fulls, self._world)
            full = torch.cat([piece for row in rows for piece in row.pieces])
        self._comm_stats.staged += full.nbytes
        free = self._tracker.allocate("staging", full.nbytes)
        try:
            return PendingWork(work=self._run(stream, full, output), finish=free)
        except BaseException:
            free()
            raise

    def all_reduce(self, tensor: torch.Tensor, stream: Stream) -> PendingWork:
        """Let the hook reduce `tensor` in place. Collective over the groups that the hook uses."""
        return self._run(stream, tensor)

    def compensated(self, residuals: Sequence[Residuals]) -> HookReducer:
        """This reducer: the hook sees gradients unquantized."""
        return self

    def _run(self, stream: Stream, *tensors: torch.Tensor) -> PendingWork:
        handed = [tensor.data for tensor in tensors]

        def take_over() -> None:
            result, left = tensors[-1], handed[-1]
            if left.shape != result.shape:
                fail(
                    UsageError(
                        f"the communication hook left a gradient of shape {tuple(left.shape)}, expected "
                        f"{tuple(result.shape)}: it must write its result into its last argument"
                    )
                )
            if left.data_ptr() != result.data_ptr() or left.dtype != result.dtype:
                result.copy_(left)
            before, _ = gradient_scaling(self._replicas, result.dtype)
            if before != 1.0:
                result.mul_(before)

        # Counted before the call: a rank that waits inside its hook has issued more than one whose hook failed.
        self._comm_stats.log("comm_hook", tensors[0].nbytes)
        with torch.no_grad(), stream.running():
            try:
                returned = self._hook.function(self._hook.state, *handed)
                work = to_wait_for(returned, "a communication hook", result=handed[-1])
            except BaseException:
                self._comm_stats.issued -= 1
                raise
            if work is not None and stream.is_callers:
                return PendingWork(work=work, keep=(*tensors, *handed), finish=take_over)
            if work is not None:
                work.wait()  # orders the stream
            take_over()
            return stream.communicating(*tensors, *handed)


def to_wait_for(returned: Any, what: str, *, result: torch.Tensor) -> Any:
    """The work to wait for before `result` is complete, given a hook's return value; None if there is none.

    Raises:
        UsageError: the hook returned something other than a work, None, or `result` (as in-place operations do).
    """
    if returned is None or returned is result:
        return None
    if callable(getattr(returned, "wait", None)):
        return returned
    fail(
        UsageError(
            f"{what} returned {shown(returned)}. It must write its result into its last argument and return either "
            "None or an object with a wait() method, after which the result is complete"
        )
    )


def left_to_average(groups: ProcessGroups) -> int:
    """The number of replicas over which the engine averages after the hook's reduction."""
    return groups.replicate.size if groups.shard.size > 1 and groups.replicate is not None else 1


def reducers(
    hook: CommHook, groups: ProcessGroups, scatter: Transport, replicate: Transport | None
) -> tuple[Reducer, Reducer | None]:
    """The reducers along the shard axis and along the replicate axis, one of which is replaced by `hook`."""
    hooked = HookReducer(hook, scatter, replicas=left_to_average(groups))
    return (scatter, hooked) if groups.shard.size == 1 else (hooked, replicate)
