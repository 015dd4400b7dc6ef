"""Which bytes of which ranks are added up where, so that the others have what a lost one had: integers only.

[Note: parity] Ranks of different machines are divided into *groups*. Each member of a group of g has a *block*, its
state as bytes. A block is cut into g - 1 *chunks*, one for each other member, and each member keeps, as its *parity*,
the exclusive or of the chunks that are its own to keep: one of each other block. So no member keeps anything of its own
block, and if one is lost, each other member finds the chunk that it keeps of the lost block: its parity without the
chunks that the others still have, which these send once more. With two members that is a copy. If two members of one
group are lost, their bytes are gone.

Per rank, with blocks of `n` bytes on all members:

- memory: n / (g - 1) for a parity, beside the blocks themselves;
- sent, and received, to make it: n, whatever the size of the group;
- sent, and received, to rebuild a lost block: n / (g - 1) for each other survivor, (g - 2) n / (g - 1) in all.

Blocks may have different sizes: chunks are as long as their own block needs, and are added up as if zeros followed.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..engine.layout.layout import Span
from ..errors import ConfigValueError, InternalError

ALIGNMENT = 64  # bytes, of which each chunk but the last is a multiple


def parity_groups(nodes: Sequence[int], size: int) -> tuple[tuple[int, ...], ...]:
    """The ranks of a job in groups of `size` ranks, or up to `size - 1` more where these do not divide the ranks; of
    one rank of each machine if there are fewer machines.

    `nodes`: the number of each rank's machine. Members of a group are on different machines, since a machine loses all
    its ranks at once; where machines have unequally many ranks, as far as possible. All ranks compute the same groups.
    A job on one machine has none: a lost rank leaves its block. [Note: blocks of a machine]

    Raises:
        ConfigValueError: a group of less than two ranks.
    """
    if size < 2:
        raise ConfigValueError(
            f"parity groups: got {size} ranks. Accepted: at least 2, since others keep a rank's state"
        )
    world, size = len(nodes), min(size, len(set(nodes)))
    if size < 2:
        return ()
    before: dict[int, int] = {}
    number_on_node = []
    for node in nodes:
        number_on_node.append(before.get(node, 0))
        before[node] = number_on_node[-1] + 1
    ordered = sorted(range(world), key=lambda rank: (number_on_node[rank], nodes[rank], rank))
    count = max(1, world // size)
    ends = [world * number // count for number in range(count + 1)]
    return tuple(tuple(sorted(ordered[ends[number] : ends[number + 1]])) for number in range(count))


def chunk_size(block: int, members: int) -> int:
    """The bytes of a chunk of a block of so many bytes, in a group of so many members; the last chunks may be shorter,
    or empty."""
    return -(-block // ((members - 1) * ALIGNMENT)) * ALIGNMENT


def kept(sizes: Sequence[int], member: int, keeper: int) -> Span:
    """The bytes of the block of `member` that are in the parity of `keeper`, another member. `sizes`: the bytes of each
    member's block."""
    if member == keeper:
        raise InternalError(f"member {member} of a parity keeps no bytes of its own block")
    chunk, whole = keeper if keeper < member else keeper - 1, sizes[member]
    size = chunk_size(whole, len(sizes))
    return Span(min(chunk * size, whole), min((chunk + 1) * size, whole))
