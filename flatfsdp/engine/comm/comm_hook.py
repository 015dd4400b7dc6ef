"""Users' communication hooks in the place of reductions.

[Note: communication hooks] A hook does the reduction over the ranks of its unit's process group, its scaling included.
Where they hold pieces it stands in the place of the reduce-scatter: `hook(state, grad, shard)`; where each holds
all of it, in that of the all-reduce: `hook(state, grad)`. Of hybrids, the mean over replicas of what it leaves is the
engine's again.

What a hook is handed it may keep, or give other `.data`, of any dtype (torch's compress hooks do; what is left there is
cast to the reduce dtype): tensors of its own, over memory that nobody resizes. So gradients of units with a hook lie in
no parameter's place. A gradient of several segments is handed over as one of one segment: in a copy, in which a rank's
piece is what the rank will have of all segments, one behind the other (`CommStats.staged` counts it).

A hook talks over the user's groups, in the order of reductions, which has no common interleaving with that of gathers
([Note: backward order]): a model with a hook gathers over the communicators that are for reductions elsewhere.
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
from .pieces import rows_of
from .transport import Reducer, Transport


class HookReducer:
    """A hook in the place of a transport's reductions. [Note: communication hooks]"""

    def __init__(self, hook: CommHook, inner: Transport, *, replicas: int) -> None:
        """`inner`: whose device and traffic it uses. The mean over `replicas` will be taken of what the hook leaves."""
        self._hook = hook
        self._device: Device = inner.device
        self._comm_stats, self._tracker = inner.comm_stats, inner.tracker
        self._world = inner.group.size
        self._replicas = replicas

    def reduce_scatter_base(self, output: torch.Tensor, full: torch.Tensor, stream: Stream) -> PendingWork:
        """Let the hook fill `output`, this rank's piece, from `full`. Collective over what the hook uses."""
        return self._run(stream, full, output)

    def reduce_scatter_coalesced(
        self, output: torch.Tensor, fulls: Sequence[torch.Tensor], stream: Stream
    ) -> PendingWork:
        """Let the hook fill `output`, this rank's pieces of `fulls` one behind the other, from a copy in which every
        rank's pieces lie so. Collective over what the hook uses."""
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
        """Let the hook change all of `tensor`. Collective over what the hook uses."""
        return self._run(stream, tensor)

    def _run(self, stream: Stream, *tensors: torch.Tensor) -> PendingWork:
        handed = [tensor.data for tensor in tensors]

        def take_over() -> None:
            result, left = tensors[-1], handed[-1]
            if left.shape != result.shape:
                fail(
                    UsageError(
                        f"the communication hook left a gradient of shape {tuple(left.shape)}, expected "
                        f"{tuple(result.shape)}: it must fill the last tensor that it is given"
                    )
                )
            if left.data_ptr() != result.data_ptr() or left.dtype != result.dtype:
                result.copy_(left)
            before, _ = gradient_scaling(self._replicas, result.dtype)
            if before != 1.0:
                result.mul_(before)

        # Before the call: a rank that waits inside of its hook has issued more than one whose hook fails.
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
            return PendingWork(device=self._device, event=stream.mark(), keep=(*tensors, *handed))


def to_wait_for(returned: Any, what: str, *, result: torch.Tensor) -> Any:
    """The work to wait for until `result` is there, by what a user's hook returned; None for nothing.

    Raises:
        UsageError: it returned something else than a work, None, or `result`, as operations in place do.
    """
    if returned is None or returned is result:
        return None
    if callable(getattr(returned, "wait", None)):
        return returned
    fail(
        UsageError(
            f"{what} returned {shown(returned)}. It must write its result into the last tensor that it is given, and "
            "return None, or what has a wait() after which the result is there"
        )
    )


def left_to_average(groups: ProcessGroups) -> int:
    """How many replicas the engine averages after a hook has reduced."""
    return groups.replicate.size if groups.shard.size > 1 and groups.replicate is not None else 1


def reducers(
    hook: CommHook, groups: ProcessGroups, scatter: Transport, replicate: Transport | None
) -> tuple[Reducer, Reducer | None]:
    """What reduces along the shard axis and along the replicate axis, with `hook` in the place of one of them."""
    hooked = HookReducer(hook, scatter, replicas=left_to_average(groups))
    return (scatter, hooked) if groups.shard.size == 1 else (hooked, replicate)
