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

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ... import comm_hooks
from ...errors import UsageError, fail, refuse_type, shown
from ..comm.axes import ProcessGroups
from ..comm.transport import Reducer, Transport
from ..config.precision import gradient_scaling
from ..config.unit_options import CommHook
from ..device.streams import Device, PendingWork, Stream, Work
from ..models.rest import check_outermost, check_outside, quiesce
from ..runtime.unit import Unit
from ..transports.pieces import pieces_of_ranks

_TORCHS = "torch.distributed.algorithms._comm_hooks.default_hooks"


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
            of_ranks = pieces_of_ranks(fulls, self._world)
            full = torch.cat([piece for each in of_ranks for piece in each.pieces])
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


def reducers(
    hook: CommHook, groups: ProcessGroups, scatter: Transport, replicate: Transport | None
) -> tuple[tuple[Reducer, Reducer | None], int]:
    """The reducers along the shard axis and along the replicate axis, one of which is replaced by `hook`; and the
    number of replicas whose results the engine averages after that."""
    replicas = groups.replicate.size if groups.shard.size > 1 and groups.replicate is not None else 1
    hooked = HookReducer(hook, scatter, replicas=replicas)
    return ((scatter, hooked) if groups.shard.size == 1 else (hooked, replicate)), replicas


def comm_hook(state: Any, function: Callable[..., Any]) -> CommHook:
    """The hook of `function` with `state`. torch's compress hooks are replaced by ours, with the same results: torch's
    record streams, which fails on a CPU and holds memory longer on an accelerator."""
    name = getattr(function, "__name__", "")
    if getattr(function, "__module__", "") == _TORCHS and name in ("fp16_compress_hook", "bf16_compress_hook"):
        function = getattr(comm_hooks, name)
    return CommHook(state, function, reducers, alike=getattr(function, "__module__", "") == comm_hooks.__name__)


def all_reduce_hook(hook: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Work | None]:
    """`hook`, whose return value is checked: the work that it returns, if any. Copied with `hook`."""
    return functools.partial(_reduce_sum, hook)


def _reduce_sum(hook: Callable[[torch.Tensor], Any], total: torch.Tensor) -> Work | None:
    work: Work | None = to_wait_for(hook(total), "an all-reduce hook", result=total)
    return work


# --- registration, with the checks of model and time ------------------------------------------------------------------


def register_comm_hook(unit: Unit, state: Any, function: Callable[..., Any]) -> None:
    """Replace the reductions of all units by a user-defined hook; only on the outermost wrapper."""
    method = "register_comm_hook()"
    if not callable(function):
        refuse_type("register_comm_hook: hook", function, "a callable (state, grad) or (state, grad, shard)")
    check_outside(unit, method)
    model = check_outermost(unit, method)
    quiesce([unit], collective=False, shards=False)
    for each in model.units:
        _check_hookable(each, method)
    hook = comm_hook(state, function)
    for each in model.units:
        model.setup.set_options(each, comm_hook=hook)
        if model.setup.ready:
            model.setup.connect(each)


def _check_hookable(unit: Unit, method: str) -> None:
    if unit.options.comm_hook is not None:
        problem = "it already has one. Register a single hook for the whole life of the model, on its outermost wrapper"
    elif any(grads.accumulation.pending for grads in unit.grads):
        problem = "gradients have accumulated that are not reduced yet. First run a backward that reduces them"
    elif unit.built.mixed_precision.reduce_bits is not None:
        bits = unit.built.mixed_precision.reduce_bits
        problem = (
            f"MixedPrecision(reduce_bits={bits}) determines how its gradients are sent, but a hook sends them itself. "
            "Use only one of the two"
        )
    elif unit.options.schedule.divide_by is not None:
        problem = (
            "set_gradient_divide_factor() was called, but a hook scales gradients itself. Divide in the hook instead"
        )
    elif unit.groups.shard.size == 1 and unit.built.traits.shards and unit.groups.replicate is not None:
        problem = "its shard group, over which a hook reduces, contains only this rank. Use NO_SHARD over the replicas"
    else:
        return
    raise UsageError(f"{method} of unit {unit.label}: {problem}")
