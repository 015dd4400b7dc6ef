"""The last two snapshots of this rank in one epoch, what it keeps of others', and how these bring a lost rank's back.

[Note: two versions] A *version* is the state of all ranks after one step, as each has copied it (`Block`), with the
parity of each group over these copies. Each rank has memory for two: one that is complete, and one that is being made.
Ranks go back to one version, which all survivors have complete, and which is whole in the blocks of the lost ranks of
their machines. So the memory of a version is used again only when a later one is complete on *all* ranks: each refresh
ends in a small all-reduce over all of them. At any time one version is complete on all: a rank that looks for it sees
that one in the blocks of others, too, since none begins the second next before this rank has completed the next.

A parity is made in *rounds*, which limit the memory for what arrives: in each, members of a group send at most `ROUND`
bytes to each other, and add them up. A lost block comes back in the same way: the others add up what they kept, once
more, and what they had. The facts of a block, which are small, each member has of each other.

Per rank, for a block of n bytes:

- on one machine: memory 2 n; per refresh a copy of n bytes, and nothing is sent;
- on several, in a group of g: 2 n / (g - 1) more memory, and (g - 1) `ROUND` during a refresh; per refresh n bytes
  sent, and n received, too. [Note: parity]
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from ..engine.base.plain_data import decode, encode
from ..errors import InternalError, LostRankError, ranks_in_words
from .exchange import EpochRanks
from .holding import Facts, Holding
from .machines import Machines, lost_with_machine, meet
from .parity import chunk_size, kept, parity_groups
from .replicas import Alike
from .snapshot import Block

ROUND = 4 * 1024 * 1024  # bytes that a rank sends to each other member of its group at once


@dataclass
class Version:
    """One version on this rank. [Note: two versions]

    Attributes:
        block: this rank's copy.
        number: of the step after which it was taken.
        own: what else goes back with it on this rank, encoded.
        parity: what this rank keeps of the others; longer than needed.
        sizes: the bytes of each member's block.
        facts: those of each member's block, encoded.
        complete: whether parity, sizes and facts are those of the block.
    """

    block: Block
    number: int = 0
    own: bytes = b""
    parity: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    sizes: tuple[int, ...] = ()
    facts: tuple[bytes, ...] = ()
    complete: bool = False


class Keeper:
    """The versions of one epoch on this rank.

    Attributes:
        epoch: its number.
        groups: its ranks in groups that have a parity; alike: in groups that hold alike, and need none.
        members: the ranks of this one's group, in order; `place` is its own.
    """

    def __init__(
        self,
        rank: int,
        blocks: Sequence[Block],
        machines: Machines,
        *,
        groups: Sequence[tuple[int, ...]] = (),
        alike: Alike = (),
        epoch: int = 0,
    ) -> None:
        """`blocks`: memory for two versions."""
        self.epoch, self.groups, self.alike = epoch, groups, alike
        self.members = next((each for each in groups if rank in each), (rank,))
        self.place = self.members.index(rank)
        self._nodes, self._left = machines
        self._versions = [Version(block) for block in blocks]

    @classmethod
    def of_epoch(cls, epoch: int, ranks: EpochRanks, size: int, alike: Alike) -> Keeper:
        """Memory for versions, and groups of `size` where there are no ranks `alike`. Collective over `ranks`."""
        blocks = Block(), Block()
        machines = meet(blocks, ranks.all)
        groups = () if alike else parity_groups(machines.nodes, size)
        return cls(dist.get_rank(ranks.all), blocks, machines, groups=groups, alike=alike, epoch=epoch)

    def begin(self, number: int, holding: Holding, facts: bytes, own: bytes = b"") -> Version:
        """Copy a new version into the memory of the older one: `holding` with its `facts`, encoded, and what else this
        rank has of its `own`. No communication.

        Precondition: the last refresh is finished on all ranks.
        """
        oldest = min(self._versions, key=lambda each: (each.complete, each.number))
        oldest.complete, oldest.number, oldest.own = False, number, own
        oldest.block.take_back()
        offsets = holding.facts.offsets
        oldest.block.take(holding.tensors, offsets[:-1], offsets[-1], facts)
        oldest.block.set_whole(number)
        return oldest

    def complete(self, version: Version, ranks: EpochRanks) -> bool:
        """Make the parity of `version`; returns whether processes wait to join. Collective over all ranks; may run in a
        thread of its own."""
        others = {place: rank for place, rank in enumerate(self.members) if place != self.place}
        if others:
            block = version.block
            own = encode((version.number, block.nbytes, block.tail))
            received = ranks.send(own, others.values(), others.values())
            found = [decode(received.get(rank, own)) for rank in self.members]
            if len(numbers := {number for number, _, _ in found}) > 1:
                raise InternalError(f"members of a parity group refresh different steps: {numbers}")
            version.sizes = tuple(size for _, size, _ in found)
            version.facts = tuple(facts for _, _, facts in found)
            longest = chunk_size(max(version.sizes), len(version.sizes))
            if version.parity.numel() < longest:
                version.parity = torch.empty(longest, dtype=torch.uint8)
            self._add_up(version, version.parity.zero_(), others, ranks)
        version.complete = True
        return ranks.finish()

    @property
    def numbers(self) -> list[int]:
        """The numbers of the versions that are complete here, and whole in the blocks of this machine; in order."""
        complete = {each.number for each in self._versions if each.complete}
        for blocks in self._left.values():
            complete &= {number for block in blocks if (number := block.number) is not None}
        return sorted(complete)

    def version(self, number: int) -> Version:
        """The complete version of that number."""
        return next(each for each in self._versions if each.complete and each.number == number)

    def check(self, lost: Collection[int]) -> None:
        """
        Raises:
            LostRankError: nobody has the state of one of the `lost` ranks: it was lost with all ranks of its machine,
                and so were all that hold alike, or another rank of its parity group was lost, too.
        """
        alone, gone = lost_with_machine(self._nodes, lost), {*lost}
        found = [gone & {*each} for each in self.groups if len(gone & {*each}) > 1 and alone & {*each}]
        found += [{*each} for each in self.alike if alone >= {*each}]
        if found:
            raise LostRankError(
                f"{ranks_in_words(sorted(found[0]))} are lost at once, and nobody else has their state: between two "
                "refreshes, a group of ranks with a parity can lose one with its machine, and replicas all but one"
            )

    def brought(
        self, number: int, lost: Collection[int], rank_of: Mapping[int, int], ranks: EpochRanks
    ) -> list[Holding]:
        """The holdings that this rank has of the version of that number: its own block, those that `lost` ranks of its
        machine have left, and its part of one that was lost with its machine. Called by all ranks that are left.

        `rank_of`: of the ranks that are left, what they are now.
        """
        version = self.version(number)
        left = [block for rank in lost for block in self._left.get(rank, ()) if block.number == number]
        for block in left:
            block.map()
        whole = [
            Facts.decoded(block.tail).part(0, block.state, block.memory[: block.state])
            for block in (version.block, *left)
        ]
        return whole + self._rebuilt(version, lost_with_machine(self._nodes, lost), rank_of, ranks)

    def _rebuilt(
        self, version: Version, lost: Collection[int], rank_of: Mapping[int, int], ranks: EpochRanks
    ) -> list[Holding]:
        """This rank's part of the block of a lost member, from its parity and the blocks of the other members."""
        gone = next((place for place, rank in enumerate(self.members) if rank in lost), None)
        if gone is None:
            return []
        others = {place: rank_of[rank] for place, rank in enumerate(self.members) if place not in (gone, self.place)}
        data = version.parity.clone()
        self._add_up(version, data, others, ranks)
        span = kept(version.sizes, gone, self.place)
        return [Facts.decoded(version.facts[gone]).part(span.start, span.stop, data)]

    def _add_up(self, version: Version, total: torch.Tensor, others: Mapping[int, int], ranks: EpochRanks) -> None:
        """Add to `total` what this rank keeps of the blocks of `others`, given by the place of each its present rank,
        and let these have theirs of this one's. Called by all of these."""
        sizes, memory = version.sizes, version.block.memory
        going = {rank: memory[kept(sizes, self.place, place).slice] for place, rank in others.items()}
        coming = {rank: total[: kept(sizes, place, self.place).numel] for place, rank in others.items()}
        for start in range(0, chunk_size(max(sizes), len(sizes)), ROUND):
            into = {rank: chunk[start : start + ROUND] for rank, chunk in coming.items()}
            arriving = {rank: torch.empty_like(chunk) for rank, chunk in into.items()}
            ranks.swap({rank: chunk[start : start + ROUND] for rank, chunk in going.items()}, arriving)
            for rank, chunk in into.items():
                torch.bitwise_xor(chunk, arriving[rank], out=chunk)


def kept_bytes(state: int, *, ranks: int, machines: int, group: int) -> int:
    """The bytes of host memory that `survive` takes on a rank with so many bytes of state, with that argument `group`,
    in a job of so many ranks: two copies of its state, and, on several machines, two parities of others', for which it
    sends `state` bytes at a refresh. Replicas have no parity."""
    groups = parity_groups([rank * machines // ranks for rank in range(ranks)], group)
    return 2 * state + sum(-(-2 * state // (len(each) - 1)) for each in groups[:1])
