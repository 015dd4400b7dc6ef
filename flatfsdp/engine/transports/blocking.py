"""Collectives that no unit issues in a step, over the group of a transport: small values that ranks compare or combine,
and tensors that one rank sends to the others. They block the host until they are complete, except `start_maximum`.

Over an axis of one rank there is no communication, and nothing is counted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ..base import _torch
from ..base.wait_limits import blocked
from ..comm.axes import Axis
from ..comm.process_group_transport import as_bytes, wait_for
from ..comm.transport import Transport
from ..device.streams import Work, accelerator

TAG = 2**30  # of all messages, one at a time; `monitored_barrier` and users use small ones


def broadcast(axis: Transport, tensor: torch.Tensor, *, source: int = 0) -> None:
    """Overwrite `tensor` with that of group rank `source`. Collective."""
    group = axis.group
    if group.process_group is None:
        return
    axis.comm_stats.log("broadcast", tensor.nbytes)
    if tensor.numel():
        with blocked():
            dist.broadcast(as_bytes(tensor.view(-1)), group.ranks[source], group=group.process_group)


def all_reduce_now(axis: Transport, tensor: torch.Tensor, *, maximum: bool = False) -> torch.Tensor:
    """Sum (or maximum) of `tensor` over ranks, in place; for scalars such as norms. Collective."""
    if axis.group.process_group is None:
        return tensor
    axis.comm_stats.log("scalar", tensor.nbytes)
    operation = dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM
    with blocked():
        dist.all_reduce(tensor, op=operation, group=axis.group.process_group)
    return tensor


def start_maximum(axis: Transport, tensor: torch.Tensor) -> Work:
    """Start to replace `tensor`, of bytes, by its maximum over ranks, which may end at any later time. Collective."""
    axis.comm_stats.log("scalar", tensor.nbytes)
    start = _torch.unrecorded(dist.all_reduce) if _torch.profiler_runs() else dist.all_reduce
    work: Work = start(tensor, op=dist.ReduceOp.MAX, group=axis.group.process_group, async_op=True)
    return work


def gather_now(axis: Transport, tensor: torch.Tensor) -> torch.Tensor:
    """Every rank's `tensor`, stacked along a new first dimension; for small tensors. Collective."""
    if axis.group.process_group is None:
        return tensor.unsqueeze(0)
    output = tensor.new_empty((axis.group.size, *tensor.shape))
    axis.comm_stats.log("scalar", output.nbytes)
    wait_for(axis.in_order.gather(output.view(-1), tensor.reshape(-1).contiguous()))
    return output


def agree_on_maximum(flags: dict[torch.device, torch.Tensor], process_group: Any) -> dict[torch.device, torch.Tensor]:
    """The maximum over `process_group` (None: the default group) of scalars that this rank holds per device.
    Collective.

    All scalars are reduced as one, on a device that the group's backend supports (the accelerator if flags are on the
    CPU and the backend does not support that), and each device's scalar is set to the result.
    """
    if not dist.is_initialized() or dist.get_world_size(process_group) == 1:
        return flags
    served = {each.partition(":")[0] for each in str(dist.get_backend_config(process_group)).split(",")}
    here = accelerator()
    candidates = [*flags, *([here] if here is not None else [])]
    param_ref = next((device for device in candidates if device.type in served), torch.device("cpu"))
    worst = torch.stack([flag.detach().to(param_ref, torch.float32).reshape(()) for flag in flags.values()]).amax()
    with blocked():
        dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=process_group)
    for flag in flags.values():
        flag.copy_(worst)
    return flags


# --- messages ---------------------------------------------------------------------------------------------------------


def scatter_now(axis: Transport, own: torch.Tensor, piece_of: Callable[[int], torch.Tensor]) -> None:
    """Overwrite `own` with group rank 0's `piece_of(rank)`, except there. Collective.

    Rank 0 holds one piece at a time. All are of the shape and dtype of `own`.
    """
    if axis.group.process_group is None:
        return
    if _sends_batches(axis.group):
        # connects all ranks, which a batch of two cannot
        all_reduce_now(axis, own.new_zeros(1, dtype=torch.float32))
    if axis.group.rank:
        _receive(axis, own, 0)
        return
    for rank in range(1, axis.group.size):
        _send(axis, piece_of(rank), rank)


def _send(axis: Transport, tensor: torch.Tensor, target: int) -> None:
    """Send `tensor` to group rank `target`, which receives it now."""
    axis.comm_stats.messages += 1
    if not tensor.numel():
        return
    if _sends_batches(axis.group):
        _in_a_batch(dist.isend, tensor, axis.group, target)
        return
    sending = axis.group.process_group.send([as_bytes(_reachable(tensor, axis.group))], target, TAG)
    with blocked():
        sending.wait()


def _receive(axis: Transport, tensor: torch.Tensor, source: int) -> None:
    """Overwrite `tensor` with the tensor that group rank `source` sends now."""
    axis.comm_stats.messages += 1
    if not tensor.numel():
        return
    if _sends_batches(axis.group):
        _in_a_batch(dist.irecv, tensor, axis.group, source)
        return
    landing = _reachable(tensor, axis.group)
    with blocked():
        axis.group.process_group.recv([as_bytes(landing)], source, TAG).wait()
    if landing is not tensor:
        tensor.copy_(landing)


def _reachable(tensor: torch.Tensor, group: Axis) -> torch.Tensor:
    # gloo cannot send messages from an accelerator's memory.
    return tensor.cpu() if group.backend == "gloo" else tensor


def _sends_batches(group: Axis) -> bool:
    """Whether messages are batches, of one: for a bare send or receive over NCCL, torch connects the two ranks by a
    communicator of their own, which costs memory of the device for each pair."""
    return group.served_as == "nccl"


def _in_a_batch(operation: Any, tensor: torch.Tensor, group: Axis, peer: int) -> None:
    message = dist.P2POp(operation, as_bytes(tensor), group.ranks[peer], group.process_group)
    for work in dist.batch_isend_irecv([message]):
        wait_for(work)
