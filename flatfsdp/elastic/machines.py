"""Which ranks are on one machine, and the blocks there that they leave to each other.

[Note: blocks of a machine] A process that ends loses its memory, but a machine does not: so the ranks of a machine hold
each other's blocks open, and one that is lost has left its state to those. That takes no message, no parity, and no
memory but the block itself, which a rank needs anyway to go back to an earlier step. Only a machine as a whole takes
its blocks with it: parities are for that, over ranks of different machines. [Note: parity]

Processes open each other's blocks by `/proc`, which processes of one user in one namespace may; if some may not, each
of them counts as a machine of its own. Two containers of one machine are two machines.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import torch.distributed as dist

from ..engine.base.processes import this_system
from ..messages import gather
from .snapshot import Block


class Machines(NamedTuple):
    """The machines of a job's ranks.

    Attributes:
        nodes: for each rank the number of its machine; the same on all ranks.
        blocks: the blocks of the other ranks of this machine, by rank.
    """

    nodes: tuple[int, ...]
    blocks: Mapping[int, Sequence[Block]]


def meet(own: Sequence[Block], group: dist.ProcessGroup) -> Machines:
    """The machines of the ranks of `group`, over all of which this is collective. `own`: this rank's blocks."""
    call, rank = "called survive()", dist.get_rank(group)
    found = gather((this_system(), os.getpid(), [block.descriptor for block in own]), group, call=call)
    blocks, cannot = {}, ""
    for other, (system, pid, descriptors) in enumerate(found):
        if other != rank and system and system == found[rank][0]:
            try:
                blocks[other] = [Block.of_process(pid, each) for each in descriptors]
            except OSError:
                cannot = system
    alone = {"", *gather(cannot, group, call=call)}
    keys = [number if system in alone else system for number, (system, _, _) in enumerate(found)]
    nodes = tuple(keys.index(key) for key in keys)
    return Machines(nodes, {other: each for other, each in blocks.items() if nodes[other] == nodes[rank]})


def lost_with_machine(nodes: Sequence[int], lost: Collection[int]) -> set[int]:
    """Those of the `lost` ranks on whose machines no rank is left."""
    left = {node for rank, node in enumerate(nodes) if rank not in lost}
    return {rank for rank in lost if nodes[rank] not in left}
