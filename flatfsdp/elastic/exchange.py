"""The exchanges by which the ranks of one epoch keep, and rebuild, each other's states, in groups of their own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
import torch.distributed as dist

from ..engine.agreement.process_groups import new_group
from ..engine.base.wait_limits import blocked
from ..messages import gather_bytes


class ParityRanks:
    """All ranks, and the members of the parity group of this one.

    Attributes:
        all: the process group of all ranks.
    """

    def __init__(self, joining: Callable[[], Collection[int]] = tuple) -> None:
        """Create the group of all ranks, over gloo. Collective over the default group. `joining`: the processes that
        are connected to this one to join the job."""
        self._joining = joining
        self.all = new_group(tuple(range(dist.get_world_size())), "keeps the state of other ranks", backend="gloo")

    def divide(self, members: Sequence[int]) -> None:
        """Create the parity group of `members`, over gloo. Collective over them."""
        self._members = new_group(tuple(members), "keeps the state of its parity group", backend="gloo")

    def meet(self, content: bytes) -> list[bytes]:
        """The content of each member, in the order of the group. Collective over it."""
        with blocked():
            return gather_bytes(content, self._members)

    def exchange(self, arrived: torch.Tensor, sent: torch.Tensor) -> None:
        """Send each other member its row of `sent`, and receive theirs into `arrived`; shape (members - 1, n).
        Collective over the group."""
        place, count = dist.get_rank(self._members), dist.get_world_size(self._members)
        sizes = [0 if each == place else sent.shape[1] for each in range(count)]
        with blocked():
            dist.all_to_all_single(arrived.view(-1), sent.view(-1), sizes, sizes, group=self._members)

    def finish(self) -> bool:
        """Return when all ranks have called this: whether processes join through any of them."""
        count = torch.tensor([len(self._joining())])
        with blocked():
            dist.all_reduce(count, group=self.all)
        return bool(count)

    def send_parts(self, sent: Mapping[int, torch.Tensor], arriving: Mapping[int, int]) -> dict[int, torch.Tensor]:
        """Send bytes to ranks, and receive so many from ranks; by rank. Collective over all ranks."""
        nothing = torch.empty(0, dtype=torch.uint8)
        outgoing = [sent.get(rank, nothing) for rank in range(dist.get_world_size(self.all))]
        sizes = [arriving.get(rank, 0) for rank in range(len(outgoing))]
        arrived = torch.empty(sum(sizes), dtype=torch.uint8)
        with blocked():
            lengths = [each.numel() for each in outgoing]
            dist.all_to_all_single(arrived, torch.cat(outgoing), sizes, lengths, group=self.all)
        return {rank: part for rank, part in enumerate(arrived.split(sizes)) if sizes[rank]}
