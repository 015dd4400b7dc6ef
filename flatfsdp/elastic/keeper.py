"""The last two snapshots of this rank, what it keeps of others', and how these bring a lost rank's back.

[Note: two versions] A *version* is the state of all ranks after one step, as each has copied it (`Block`), with the
parity of each group over these copies. Each rank has memory for two: one that is complete, and one that is being made.
Ranks go back to one version, which all survivors have complete, and which is whole in the blocks of the lost ranks of
their machines. So the memory of a version is used again only when a later one is complete on *all* ranks: each refresh
ends in a small all-reduce over all of them. At any time one version is complete on all: a rank that looks for it sees
that one in the blocks of others, too, since none begins the second next before this rank has completed the next.

A parity is made in *rounds*, which limit the memory for what arrives: in each, members of a group exchange at most
`ROUND` bytes with each other, and add them up.

Per rank, for a block of n bytes:

- on one machine: memory 2 n; per refresh a copy of n bytes, and nothing is sent;
- on several, in a group of g: 2 n / (g - 1) more memory, and 2 (g - 1) `ROUND` during a refresh; per refresh n bytes
  sent, and n received, too. [Note: parity]
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple, Protocol

import torch

from ..errors import InternalError, LostRankError, ranks_in_words
from .machines import lost_with_machine
from .parity import Parity, parity_groups
from .snapshot import Block

ROUND = 4 * 1024 * 1024  # bytes that a rank sends to each other member of its group at once


class Group(Protocol):
    """The exchanges of a version: with the members of this rank's group, and with all ranks. Each blocks the caller."""

    def meet(self, numbers: tuple[int, ...]) -> list[tuple[int, ...]]:
        """The numbers of each member, equally many, in the order of the group."""

    def exchange(self, arrived: torch.Tensor, sent: torch.Tensor) -> None:
        """Send each other member its row of `sent`, and receive theirs into `arrived`; shape (members - 1, n)."""

    def finish(self) -> bool:
        """Return when all ranks of the job have called this: whether processes wait to join them."""


class Sizes(NamedTuple):
    """The sizes of a block in bytes."""

    state: int
    tail: int


@dataclass
class Version:
    """One version on this rank. [Note: two versions]

    Attributes:
        block: this rank's copy.
        number: of the step after which it was taken.
        parity: what this rank keeps of the others; longer than needed.
        sizes: the sizes of each member's block.
        complete: whether parity and sizes are those of the block.
    """

    block: Block
    number: int = 0
    parity: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    sizes: tuple[Sizes, ...] = ()
    complete: bool = False

    @property
    def scheme(self) -> Parity:
        """Which bytes are kept where."""
        return Parity(tuple(each.state + each.tail for each in self.sizes))


class Rebuilt(NamedTuple):
    """Bytes of the block of a lost member that this rank has rebuilt: those from `start` on."""

    member: int
    start: int
    data: torch.Tensor


class Keeper:
    """This rank's versions.

    Attributes:
        members: the ranks of its group, in order; `place` is its own.
        left: the two blocks of each other rank of this machine, by rank.
    """

    def __init__(
        self,
        members: Sequence[int],
        rank: int,
        blocks: Sequence[Block],
        left: Mapping[int, Sequence[Block]] = MappingProxyType({}),
    ) -> None:
        """`blocks`: memory for two."""
        self.members = tuple(members)
        self.place = self.members.index(rank)
        self.left = left
        self._versions = [Version(block) for block in blocks]

    def begin(self, number: int, take: Callable[[Block], None]) -> Version:
        """Let `take` fill the block of a new version, in the memory of the older one. No communication.

        Precondition: the last refresh is finished on all ranks.
        """
        oldest = min(self._versions, key=lambda each: (each.complete, each.number))
        oldest.complete, oldest.number = False, number
        oldest.block.take_back()
        take(oldest.block)
        oldest.block.set_whole(number)
        return oldest

    def complete(self, version: Version, group: Group) -> bool:
        """Make the parity of `version`; returns whether processes wait to join. Collective over all ranks; may run in a
        thread of its own."""
        if len(self.members) > 1:  # else there is one machine
            block = version.block
            found = group.meet((version.number, block.state, block.tail))
            if len({number for number, _, _ in found}) > 1:
                raise InternalError(f"members of a parity group refresh different steps: {found}")
            version.sizes = tuple(Sizes(state, tail) for _, state, tail in found)
            _add_up(version, self.place, group)
        version.complete = True
        return group.finish()

    @property
    def numbers(self) -> list[int]:
        """The numbers of the versions that are complete here, and whole in the blocks of this machine; in order."""
        complete = {each.number for each in self._versions if each.complete}
        for blocks in self.left.values():
            complete &= {number for block in blocks if (number := block.number) is not None}
        return sorted(complete)

    def version(self, number: int) -> Version:
        """The complete version of that number."""
        return next(each for each in self._versions if each.complete and each.number == number)

    def blocks_of(self, version: Version, lost: Collection[int]) -> list[Block]:
        """Those of `version` that lost ranks of this machine have left."""
        found = [block for rank in lost for block in self.left.get(rank, ()) if block.number == version.number]
        for block in found:
            block.map()
        return found

    def parts_to_send(self, version: Version, lost: Collection[int]) -> dict[int, torch.Tensor]:
        """By member, the bytes of this rank's block that it needs to rebuild its part of the block of a lost one."""
        gone = [place for place, rank in enumerate(self.members) if rank in lost]
        sent: dict[int, torch.Tensor] = {}
        for place in range(len(self.members)) if gone else ():
            if place not in (*gone, self.place):
                sent[place] = version.block.memory[version.scheme.needed(gone[0], place)[self.place].slice]
        return sent

    def parts_to_receive(self, version: Version, lost: Collection[int]) -> dict[int, int]:
        """By member, how many bytes of its block this rank needs."""
        gone = [place for place, rank in enumerate(self.members) if rank in lost]
        needed = version.scheme.needed(gone[0], self.place) if gone else {}
        return {place: span.numel for place, span in needed.items()}

    def rebuild(self, version: Version, lost: Collection[int], arrived: Mapping[int, torch.Tensor]) -> Rebuilt | None:
        """This rank's part of the block of a lost member, from the bytes of others that it has asked for; None if its
        group has lost none."""
        gone = [place for place, rank in enumerate(self.members) if rank in lost]
        if not gone:
            return None
        kept = version.scheme.kept(gone[0], self.place)
        data = version.parity[: kept.numel].clone()
        for part in arrived.values():
            into = data[: part.numel()]
            torch.bitwise_xor(into, part, out=into)
        return Rebuilt(gone[0], kept.start, data)


def kept_bytes(state: int, *, ranks: int, machines: int, group: int) -> int:
    """The bytes of host memory that `survive` takes on a rank with so many bytes of state, with that argument `group`,
    in a job of so many ranks: two copies of its state, and, on several machines, two parities of others', for which it
    sends `state` bytes at a refresh. Replicas have no parity."""
    groups = parity_groups([rank * machines // ranks for rank in range(ranks)], group)
    return 2 * state + sum(-(-2 * state // (len(each) - 1)) for each in groups[:1])


def check_losses(groups: Sequence[Sequence[int]], nodes: Sequence[int], lost: Collection[int]) -> None:
    """
    Raises:
        LostRankError: two of the `lost` ranks are in one of `groups`, and one of them was lost with all ranks of its
            machine (`nodes`: the machine of each rank), so that nobody has its state.
    """
    with_machine = lost_with_machine(nodes, lost)
    for members in groups:
        gone = sorted(set(members) & set(lost))
        if len(gone) > 1 and with_machine & {*gone}:
            raise LostRankError(
                f"{ranks_in_words(gone)} are lost at once, and both keep the state of the other: the group of "
                f"{ranks_in_words(sorted(members))} can lose one rank with its machine between two refreshes, and "
                "smaller ones more between them"
            )


def _add_up(version: Version, place: int, group: Group) -> None:
    """Fill the parity of `version`, whose sizes are known, in rounds. Collective over the group."""
    scheme, others = version.scheme, len(version.sizes) - 1
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
            group.exchange(total.view(1, size), sent)
            continue
        arrived = torch.empty(others, size, dtype=torch.uint8)
        group.exchange(arrived, sent.contiguous())
        terms = arrived.view(torch.int64)  # chunks, and rounds, are multiples of 8 bytes
        total = total.view(torch.int64)
        torch.bitwise_xor(terms[0], terms[1], out=total)
        for term in terms[2:]:
            torch.bitwise_xor(total, term, out=total)
