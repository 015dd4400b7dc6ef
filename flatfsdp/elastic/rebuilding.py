"""The versions that a rank keeps of one epoch, and what it brings of them to the re-shard after a loss: its own block,
those that lost ranks of its machine have left, and its part of one that was lost with its machine."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..engine.base.plain_data import bytes_of, decode, encode
from ..messages import gather_bytes
from .exchange import ParityRanks
from .holding import Holding
from .inventory import read_tail
from .keeper import Keeper, Version, check_losses
from .machines import lost_with_machine, meet
from .parity import parity_groups
from .replicas import Alike, check_alike
from .snapshot import Block


class Kept(NamedTuple):
    """The versions of one epoch on this rank, and who has what is lost with some ranks of it.

    Attributes:
        epoch: its number.
        keeper: the versions.
        nodes: the machines of its members, by rank.
        groups: their ranks in parity groups; alike: in groups that hold alike.
    """

    epoch: int
    keeper: Keeper
    nodes: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]
    alike: Alike

    @classmethod
    def of_epoch(cls, epoch: int, ranks: ParityRanks, size: int, alike: Alike) -> Kept:
        """Memory for versions, and groups of `size` where there are no ranks `alike`. Collective over `ranks`."""
        rank, blocks = dist.get_rank(ranks.all), (Block(), Block())
        nodes, left = meet(blocks, ranks.all)
        groups = () if alike else parity_groups(nodes, size)
        members = next((each for each in groups if rank in each), (rank,))
        if groups:
            ranks.divide(members)
        return cls(epoch, Keeper(members, rank, blocks, left), nodes, groups, alike)

    def check(self, lost: Collection[int]) -> None:
        """
        Raises:
            LostRankError: nobody has the state of one of the `lost` ranks.
        """
        check_losses(self.groups, self.nodes, lost)
        check_alike(self.alike, lost_with_machine(self.nodes, lost))


def brought(
    kept: Kept | None, number: int, lost: Collection[int], rank_of: Mapping[int, int], ranks: ParityRanks
) -> tuple[list[Holding], Mapping[str, Any] | None]:
    """The holdings of this rank from the version of that number of the epoch `kept`, and its own state; none without
    it, if it joins. Collective.

    `lost`: ranks of that epoch; `rank_of`: of those that are left, what they are now.
    """
    if kept is None:
        ranks.send_parts({}, {})
        gather_bytes(encode([]), ranks.all)
        return [], None
    keeper = kept.keeper
    version = keeper.version(number)
    found = []
    for block in (version.block, *keeper.blocks_of(version, lost)):
        facts, state = read_tail(_bytes(block.memory[block.state : block.nbytes]))
        found.append((facts.part(0, block.state, block.memory[: block.state]), state))
    holdings = [holding for holding, _ in found] + _rebuilt(
        keeper, version, lost_with_machine(kept.nodes, lost), rank_of, ranks
    )
    return holdings, found[0][1]


def _rebuilt(
    keeper: Keeper, version: Version, lost: Collection[int], rank_of: Mapping[int, int], ranks: ParityRanks
) -> list[Holding]:
    """The part of a lost block that this rank rebuilds. Collective."""
    members = keeper.members
    sent = {rank_of[members[place]]: part for place, part in keeper.parts_to_send(version, lost).items()}
    awaited = {rank_of[members[place]]: size for place, size in keeper.parts_to_receive(version, lost).items()}
    rebuilt = keeper.rebuild(version, lost, ranks.send_parts(sent, awaited))
    pieces: list[tuple[int, int, bytes]] = []
    if rebuilt is not None:
        rank, (size, tail) = members[rebuilt.member], version.sizes[rebuilt.member]
        first, end = max(rebuilt.start, size), min(rebuilt.start + rebuilt.data.numel(), size + tail)
        if first < end:
            pieces.append((rank, first, _bytes(rebuilt.data[first - rebuilt.start : end - rebuilt.start])))
    tails: dict[int, list[tuple[int, bytes]]] = {}
    for found in gather_bytes(encode(pieces), ranks.all):
        for rank, first, data in decode(found):
            tails.setdefault(rank, []).append((first, data))
    if rebuilt is None:
        return []
    theirs, _ = read_tail(b"".join(data for _, data in sorted(tails[members[rebuilt.member]])))
    stop = min(rebuilt.start + rebuilt.data.numel(), version.sizes[rebuilt.member].state)
    if rebuilt.start >= stop:
        return []
    return [theirs.part(rebuilt.start, stop, rebuilt.data[: stop - rebuilt.start])]


def _bytes(data: torch.Tensor) -> bytes:
    return bytes(bytes_of(data.contiguous()))
