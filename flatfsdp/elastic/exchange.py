"""Messages between ranks: by these they keep, and rebuild, each other's states, and a model moves.

[Note: exchanges] Each message goes directly from the memory that has it into the memory that needs it. Only ranks with
something to send or to receive take part.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist

from ..engine.agreement.process_groups import new_group
from ..engine.base.plain_data import bytes_of
from ..engine.base.wait_limits import blocked

Message = tuple[int, torch.Tensor]  # a rank of the group, and dense memory


def swap(
    sent: Iterable[Message],
    arriving: Iterable[Message],
    group: dist.ProcessGroup,
    waiting: Callable[[], AbstractContextManager[None]] = blocked,
) -> None:
    """Send memory to ranks of `group`, and fill memory from ranks, in the order in which each of them sends it. Returns
    when all of it is there. `waiting`: a context around the wait for each message."""
    pairs = [(dist.isend, message) for message in sent] + [(dist.irecv, message) for message in arriving]
    made = [dist.P2POp(op, each, group=group, group_peer=rank) for op, (rank, each) in pairs if each.numel()]
    for work in dist.batch_isend_irecv(made) if made else ():
        with waiting():
            work.wait()


class EpochRanks:
    """All ranks of an epoch, over gloo.

    Attributes:
        all: their process group.
    """

    def __init__(self, joining: Callable[[], Collection[int]] = tuple) -> None:
        """Collective over the default group. `joining`: the processes that are connected to this one to join the
        job."""
        self._joining = joining
        self.all = new_group(tuple(range(dist.get_world_size())), "keeps the state of other ranks", backend="gloo")

    def swap(self, sent: Mapping[int, torch.Tensor], arriving: Mapping[int, torch.Tensor]) -> None:
        """Send memory to ranks, and fill memory from ranks, by rank."""
        swap(sent.items(), arriving.items(), self.all)

    def send(self, content: bytes, to: Iterable[int], by: Iterable[int]) -> dict[int, bytes]:
        """Send `content` to ranks; returns that of ranks, which call this, too."""
        sizes = {rank: torch.zeros(1, dtype=torch.int64) for rank in by}
        self.swap(dict.fromkeys(to, torch.tensor([len(content)])), sizes)
        found = {rank: torch.empty(int(size), dtype=torch.uint8) for rank, size in sizes.items()}
        self.swap(dict.fromkeys(to, torch.frombuffer(bytearray(content), dtype=torch.uint8)), found)
        return {rank: bytes(bytes_of(each)) for rank, each in found.items()}

    def finish(self) -> bool:
        """Return when all ranks have called this: whether processes join through any of them."""
        count = torch.tensor([len(self._joining())])
        with blocked():
            dist.all_reduce(count, group=self.all)
        return bool(count)
