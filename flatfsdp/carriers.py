"""Values of state dicts in torch's classes for distributed tensors: what others wrote, and what they ask for.

They split a tensor by rows, not where our shards end: both ways take communication. Where an `OwnedInterval` will do,
nothing here is needed.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from . import _torch
from .comm import Group
from .errors import UsageError


def is_distributed(value: Any) -> bool:
    """Whether `value` is a DTensor or a ShardedTensor."""
    return type(value).__name__ in ("DTensor", "ShardedTensor") and type(value).__module__.startswith("torch.")


def whole_of(value: Any) -> torch.Tensor:
    """The whole of a DTensor or a ShardedTensor. Collective over its mesh, or its process group."""
    if type(value).__name__ == "DTensor":
        return value.full_tensor()
    shards = value.local_shards()
    group = _torch.group_of_sharded_tensor(value)
    device = shards[0].tensor.device if shards else torch.device("cpu")
    if "nccl" in str(dist.get_backend(group)):
        device = torch.device(device.type if device.type != "cpu" else "cuda")
    whole = torch.zeros(value.size(), dtype=value.dtype, device=device)
    for shard in shards:
        block = whole
        sizes = shard.metadata.shard_sizes
        for dim, (offset, size) in enumerate(zip(shard.metadata.shard_offsets, sizes, strict=True)):
            block = block.narrow(dim, offset, size)
        block.copy_(shard.tensor.view(sizes))
    # Each byte comes from one rank, all others add zeros to it: as bytes, because -0.0 + 0.0 is 0.0.
    dist.all_reduce(whole.view(-1).view(torch.uint8), group=group)
    return whole


def rows_of(whole: torch.Tensor, axis: Group, *, as_dtensor: bool) -> Any:
    """This rank's rows of `whole` as a DTensor or a ShardedTensor over `axis`, in memory of its own.

    Rows are split as `torch.chunk` does, the last ranks may have none. What has no rows stays a tensor (DTensor:
    replicated). Collective over the axis.
    """
    if axis.process_group is None:
        raise UsageError(
            "state dicts of DTensors or ShardedTensors need a shard axis of several ranks, but here every rank holds "
            'whole parameters (NO_SHARD, or one rank). Use ShardedStateDictConfig(sharded_as="interval"), or '
            "FULL_STATE_DICT"
        )
    chunks = whole.chunk(axis.size, 0) if whole.dim() else ()
    own = chunks[axis.rank].clone() if axis.rank < len(chunks) else whole[:0].clone() if whole.dim() else whole.clone()
    if as_dtensor:
        return _torch.dtensor_of_rows(own, whole, axis.process_group)
    if not whole.dim():
        return own
    first = sum(chunk.shape[0] for chunk in chunks[: axis.rank])
    return _torch.sharded_tensor_of_rows(own, first, whole.shape, axis.process_group)
