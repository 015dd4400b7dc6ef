"""The last two snapshots of this rank in one epoch, what it keeps of others', and how these bring a lost rank's back.

[Note: two versions] A *version* is the state of all ranks after one step, as each has copied it (`Block`), with the
parity of each group over these copies. Each rank has memory for two: one that is complete, and one that is being made.
Ranks go back to one version, which all survivors have complete, and which is whole in the blocks of the lost ranks of
their machines. So the memory of a version is used again only when a later one is complete on *all* ranks: each refresh
ends in a small all-reduce over all of them. At any time one version is complete on all: a rank that looks for it sees
that one in the blocks of others, too, since none begins the second next before this rank has completed the next.

A parity is made in *rounds*, which limit the memory for what arrives: in each, members of a group exchange at most
`ROUND` bytes with each other, and add them up. The facts of a block, which are small, each member has of each other.

Per rank, for a block of n bytes:

- on one machine: memory 2 n; per refresh a copy of n bytes, and nothing is sent;
- on several, in a group of g: 2 n / (g - 1) more memory, and 2 (g - 1) `ROUND` during a refresh; per refresh n bytes
  sent, and n received, too. [Note: parity]
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from ..engine.base.plain_data import decode, encode
from ..errors import InternalError, LostRankError, ranks_in_words
from .exchange import ParityRanks
from .holding import Facts, Holding
from .machines import Machines, lost_with_machine, meet
from .parity import Parity, parity_groups
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
    def of_epoch(cls, epoch: int, ranks: ParityRanks, size: int, alike: Alike) -> Keeper:
        """Memory for versions, and groups of `size` where there are no ranks `alike`. Collective over `ranks`."""
        blocks = Block(), Block()
        machines = meet(blocks, ranks.all)
        groups = () if alike else parity_groups(machines.nodes, size)
        made = cls(dist.get_rank(ranks.all), blocks, machines, groups=groups, alike=alike, epoch=epoch)
        if groups:
            ranks.divide(made.members)
        return made

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

    def complete(self, version: Version, ranks: ParityRanks) -> bool:
        """Make the parity of `version`; returns whether processes wait to join. Collective over all ranks; may run in a
        thread of its own."""
        if self.groups:
            block = version.block
            found = [decode(each) for each in ranks.meet(encode((version.number, block.nbytes, block.tail)))]
            if len(numbers := {number for number, _, _ in found}) > 1:
                raise InternalError(f"members of a parity group refresh different steps: {numbers}")
            version.sizes = tuple(size for _, size, _ in found)
            version.facts = tuple(facts for _, _, facts in found)
            _add_up(version, self.place, ranks)
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
        self, number: int, lost: Collection[int], rank_of: Mapping[int, int], ranks: ParityRanks
    ) -> list[Holding]:
        """The holdings that this rank has of the version of that number: its own block, those that `lost` ranks of its
        machine have left, and its part of one that was lost with its machine. Collective.

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
        self, version: Version, lost: Collection[int], rank_of: Mapping[int, int], ranks: ParityRanks
    ) -> list[Holding]:
        """This rank's part of the block of a lost member, from its parity and bytes of the other members. Collective
        over all ranks."""
        gone = next((place for place, rank in enumerate(self.members) if rank in lost), None)
        if gone is None:
            ranks.send_parts({}, {})
            return []
        scheme, sent, awaited = Parity(version.sizes), {}, {}
        for place, rank in enumerate(self.members):
            if place not in (gone, self.place):
                sent[rank_of[rank]] = version.block.memory[scheme.needed(gone, place)[self.place].slice]
                awaited[rank_of[rank]] = scheme.needed(gone, self.place)[place].numel
        kept = scheme.kept(gone, self.place)
        data = version.parity[: kept.numel].clone()
        for part in ranks.send_parts(sent, awaited).values():
            into = data[: part.numel()]
            torch.bitwise_xor(into, part, out=into)
        return [Facts.decoded(version.facts[gone]).part(kept.start, kept.stop, data)]


def kept_bytes(state: int, *, ranks: int, machines: int, group: int) -> int:
    """The bytes of host memory that `survive` takes on a rank with so many bytes of state, with that argument `group`,
    in a job of so many ranks: two copies of its state, and, on several machines, two parities of others', for which it
    sends `state` bytes at a refresh. Replicas have no parity."""
    groups = parity_groups([rank * machines // ranks for rank in range(ranks)], group)
    return 2 * state + sum(-(-2 * state // (len(each) - 1)) for each in groups[:1])


def _add_up(version: Version, place: int, ranks: ParityRanks) -> None:
    """Fill the parity of `version`, whose sizes are known, in rounds. Collective over the group."""
    scheme, others = Parity(version.sizes), len(version.sizes) - 1
    longest = max(scheme.chunk_sizes)
    if version.parity.numel() < longest:
        version.parity = torch.empty(longest, dtype=torch.uint8)
    rows = version.block.rows(others, scheme.chunk_sizes[place])
    for start in range(0, longest, ROUND):
        size = min(ROUND, longest - start)
        sent = rows[:, start : start + size]
        if sent.shape[1] < size:  # this block is shorter than another
            padded = torch.zeros(others, size, dtype=torch.uint8)
            padded[:, : sent.shape[1]] = sent
            sent = padded
        total = version.parity[start : start + size]
        if others == 1:
            ranks.exchange(total.view(1, size), sent)
            continue
        arrived = torch.empty(others, size, dtype=torch.uint8)
        ranks.exchange(arrived, sent.contiguous())
        terms = arrived.view(torch.int64)  # chunks, and rounds, are multiples of 8 bytes
        total = total.view(torch.int64)
        torch.bitwise_xor(terms[0], terms[1], out=total)
        for term in terms[2:]:
            torch.bitwise_xor(total, term, out=total)
