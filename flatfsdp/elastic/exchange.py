"""The exchanges of snapshots, over process groups of their own, which serve host memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
import torch.distributed as dist

from ..engine.agreement.process_groups import new_group
from ..engine.base.wait_limits import blocked
from ..engine.comm.axes import Axis
from ..engine.comm.comm_stats import CommStats
from ..engine.device.memory import MemoryTracker
from ..engine.device.streams import Device
from ..engine.transports.blocking import all_reduce_now, gather_now
from ..engine.transports.staged import StagedTransport
from ..engine.wrapping.exchanges import EXCHANGES

CPU = torch.device("cpu")


class ParityRanks:
    """`keeper.Group` over two process groups: of the members of a parity group, and of all ranks."""

    def __init__(self, joining: Callable[[], Collection[int]] = tuple) -> None:
        """Create the group of all ranks, over gloo. Collective over the default group. `joining`: the processes that
        are connected to this one to join the job."""
        self._joining = joining
        world = tuple(range(dist.get_world_size()))
        self._all = _transport(new_group(world, "keeps the state of other ranks", backend="gloo"))

    def divide(self, members: Sequence[int]) -> None:
        """Create the parity group of `members`, over gloo. Collective over them."""
        self._group = _transport(new_group(tuple(members), "keeps the state of its parity group", backend="gloo"))
        self._stream = self._group.device.new_stream("parity")

    def meet(self, numbers: tuple[int, ...]) -> list[tuple[int, ...]]:
        """The numbers of each member."""
        gathered = gather_now(self._group, torch.tensor(numbers))
        return [tuple(each) for each in gathered.tolist()]

    def exchange(self, arrived: torch.Tensor, sent: torch.Tensor) -> None:
        """Send each other member its row of `sent`, and receive theirs into `arrived`."""
        self._group.all_to_all(arrived, sent, self._stream).wait()

    def finish(self) -> bool:
        """Return when all ranks have called this: whether processes join through any of them."""
        return bool(all_reduce_now(self._all, torch.tensor([len(self._joining())], dtype=torch.int32)))

    def send_parts(self, sent: Mapping[int, torch.Tensor], arriving: Mapping[int, int]) -> dict[int, torch.Tensor]:
        """Send bytes to ranks, and receive so many from ranks; by rank. Collective over all ranks."""
        ranks = range(self._all.group.size)
        nothing = torch.empty(0, dtype=torch.uint8)
        outgoing = torch.cat([sent.get(rank, nothing) for rank in ranks])
        sizes = [arriving.get(rank, 0) for rank in ranks]
        arrived = torch.empty(sum(sizes), dtype=torch.uint8)
        with blocked():
            dist.all_to_all_single(
                arrived,
                outgoing,
                sizes,
                [sent.get(rank, nothing).numel() for rank in ranks],
                group=self._all.group.process_group,
            )
        return {rank: part for rank, part in enumerate(arrived.split(sizes)) if sizes[rank]}

    @property
    def all(self) -> dist.ProcessGroup:
        """The group of all ranks."""
        group: dist.ProcessGroup = self._all.group.process_group
        return group


def _transport(process_group: dist.ProcessGroup) -> StagedTransport:
    axis = Axis.of(process_group, CPU)
    made = EXCHANGES.transport(axis, Device(CPU), comm_stats=CommStats(), tracker=MemoryTracker())
    assert isinstance(made, StagedTransport)  # as for every group of more than one rank
    return made
