"""Plain values between the ranks of a process group, whatever its backend. [Note: plain data]"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from .engine.agreement.collective_calls import meet
from .engine.base.plain_data import decode, encode
from .engine.device.streams import accelerator
from .engine.watchdog.watchdog import expecting


def gather(value: Any, group: dist.ProcessGroup, *, call: str) -> list[Any]:
    """Every rank's `value`, in the order of the group's ranks. Collective over the group, two all-gathers.

    Args:
        value: plain data; tensors in it arrive on the CPU.
        group: on which this rank is.
        call: what the ranks meet in before, to follow "rank 0 ". [Note: calls]

    Raises:
        UsageError: it is no plain data.
        AgreementError: on every rank: some make another call.
        LostRankError: a rank has ended.
    """
    content = encode(value)
    members = dist.get_process_group_ranks(group)
    with expecting(members, call):
        meet(group, members, call)
        return [decode(each) for each in gather_bytes(content, group)]


def gather_bytes(content: bytes, group: dist.ProcessGroup) -> list[bytes]:
    """Every rank's `content`, in the order of the group's ranks. Collective over the group, two all-gathers."""
    on_host = "cpu" in str(dist.get_backend_config(group))
    device = torch.device("cpu") if on_host else accelerator() or torch.device("cpu")
    own = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    sizes = [torch.empty(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([own.numel()], device=device), group=group)
    block = torch.zeros(max(map(int, sizes)), dtype=torch.uint8, device=device)
    block[: own.numel()] = own.to(device)
    blocks = [torch.empty_like(block) for _ in sizes]
    dist.all_gather(blocks, block, group=group)
    return [each[: int(size)].cpu().numpy().tobytes() for each, size in zip(blocks, sizes, strict=True)]
