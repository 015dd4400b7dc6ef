"""Exchange of plain values between the ranks of a process group, for any backend, and the loss of one. [Note: plain
data]"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from .engine.agreement import object_collectives
from .engine.agreement.collective_calls import meet
from .engine.agreement.object_collectives import description_of
from .engine.base import _torch
from .engine.base.plain_data import decode, encode, gathered
from .engine.device.streams import accelerator
from .engine.watchdog.regions import expecting
from .engine.watchdog.termination import end_if_a_rank_is_lost as end_if_a_rank_is_lost

T = TypeVar("T")


def start_unrecorded(collective: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Call `collective`, asynchronous, which may end after a torch profiler has stopped: so it is not recorded.

    A record that gloo ends later is written to memory that the profiler has freed. Collective as that is.
    """
    call = _torch.unrecorded(collective) if _torch.profiler_runs() else collective
    found: T = call(*args, **kwargs)
    return found


def gather(value: Any, group: dist.ProcessGroup, *, call: str) -> list[Any]:
    """Every rank's `value`, in the order of the group's ranks. Collective over the group, two all-gathers.

    Args:
        value: plain data; tensors in it arrive on the CPU.
        group: a group that includes this rank.
        call: the common call for which the ranks meet first, to follow "rank 0 ". [Note: calls]

    Raises:
        UsageError: it is not plain data.
        AgreementError: on every rank: some make another call.
        LostRankError: a rank has ended.
    """
    return [decode(each) for each in meet_and_gather(encode(value), group, call=call).values()]


def on_all_ranks(
    work: Callable[[], T],
    group: dist.ProcessGroup | None,
    *,
    call: str,
    raises: Callable[[Mapping[int, str], Exception | None], Exception],
    describe: Callable[[Exception], str] = description_of,
) -> list[T]:
    """Let every rank do its `work`; returns all ranks' results, in the order of the group's ranks. A failure on one
    rank is a failure on all. Collective over the group, two all-gathers.

    Args:
        work: returns plain data.
        group: a group that includes this rank; None for this process alone.
        call: as for `gather`.
        raises: makes the exception to raise from the failed ranks with their descriptions, and this rank's own
            exception, which it may return.
        describe: a description of an exception for the other ranks.

    Raises:
        Exception: the result of `raises`.
        AgreementError: on every rank: some make another call.
        LostRankError: a rank has ended.
    """

    exchange = None if group is None else partial(meet_and_gather, group=group, call=call)
    return [*object_collectives.on_all_ranks(work, exchange, raises=raises, describe=describe).values()]


def meet_and_gather(
    content: bytes, group: dist.ProcessGroup, *, call: str, waiting: str | None = None
) -> dict[int, bytes]:
    """Every rank's `content`, by the number of the rank in the group. Collective over the group, two all-gathers.

    Args:
        content: any bytes.
        group: a group that includes this rank.
        call: the common call for which the ranks meet first, to follow "rank 0 ". [Note: calls]
        waiting: the description of a rank that waits for the others in it; None for `call`.

    Raises:
        AgreementError: on every rank: some make another call.
        LostRankError: a rank has ended.
    """
    members = dist.get_process_group_ranks(group)
    with expecting(members, waiting or call):
        meet(group, members, call)
        return dict(enumerate(gather_bytes(content, group)))


def gather_bytes(content: bytes, group: dist.ProcessGroup) -> list[bytes]:
    """Every rank's `content`, in the order of the group's ranks. Collective over the group, two all-gathers."""
    serves_host = "cpu" in str(dist.get_backend_config(group))
    device = torch.device("cpu") if serves_host else accelerator() or torch.device("cpu")

    def gather(own: torch.Tensor) -> torch.Tensor:
        rows = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(rows, own, group=group)
        return torch.cat(rows)

    return gathered(content, device, gather)
