"""Which reductions are waited for where they are issued, as far as it is known without communication."""

from __future__ import annotations

import torch

from ..device.fake_tensors import is_memoryless
from .axes import Axis
from .shared_memory.collectives import is_waited_for_early
from .shared_memory.groups import shares, would_share


def waits_early(group: Axis, device: torch.device, sent: int) -> bool | None:
    """Whether a reduction over `group`, on `device`, of which a rank sends so many bytes is waited for early; None
    where the group's first exchange decides. [Note: in waits]"""
    if group.served_as != "gloo" or device.type != "cpu" or not is_waited_for_early(sent):
        return False
    known = shares(group.process_group)
    if known is not None:
        return known
    if not would_share(group.process_group):
        return False
    return True if is_memoryless() else None
