"""Parts of different sizes from each rank to each other one, over the group of a transport."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from ..comm.transport import Transport
from ..device.streams import PendingWork


def start_all_to_all(
    axis: Transport,
    arrived: torch.Tensor,
    sent: torch.Tensor,
    arriving: Sequence[int],
    sending: Sequence[int],
    *,
    category: str = "all_to_all",
) -> PendingWork:
    """Start to send each rank its part of `sent`, `sending` elements in rank order, and to receive into `arrived` the
    `arriving` elements of each rank; none from a rank to itself. Both are 1-D, contiguous and of one dtype. Collective,
    also for a rank without elements.

    Counted as one collective of this `category`, of the bytes that this rank sends.
    """
    axis.comm_stats.log(category, sent.nbytes)
    size = sent.element_size()
    work = dist.all_to_all_single(
        arrived.view(torch.uint8),
        sent.view(torch.uint8),
        [size * count for count in arriving],
        [size * count for count in sending],
        group=axis.group.process_group,
        async_op=True,
    )
    return PendingWork(work=work, keep=(arrived, sent))
