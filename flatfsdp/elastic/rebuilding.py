"""The holdings that this rank brings to `regroup` after a loss: its own block, and its part of a lost one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..engine.base.plain_data import bytes_of, decode, encode
from ..messages import gather_bytes
from .exchange import ParityRanks
from .holding import Facts, Holding
from .keeper import Keeper


def brought(
    keeper: Keeper | None, number: int, lost: Sequence[int], rank_of: Mapping[int, int], ranks: ParityRanks
) -> tuple[list[Holding], Mapping[str, Any] | None]:
    """The holdings of this rank from the version of that number, and its own state; none without a `keeper`, if it
    joins. Collective.

    `lost`: ranks of that version; `rank_of`: of those that are left, what they are now.
    """
    if keeper is None:
        ranks.send_parts({}, {})
        gather_bytes(encode([]), ranks.all)
        return [], None
    members, version = keeper.members, keeper.version(number)
    sent = {rank_of[members[place]]: part for place, part in keeper.parts_to_send(version, lost).items()}
    awaited = {rank_of[members[place]]: size for place, size in keeper.parts_to_receive(version, lost).items()}
    arrived = ranks.send_parts(sent, awaited)
    rebuilt = keeper.rebuild(version, lost, arrived)
    block = version.block
    facts, state = decode(_bytes(block.memory[block.state : block.nbytes]))
    holdings = [facts.part(0, block.state, block.memory[: block.state])]
    pieces: list[tuple[int, int, bytes]] = []
    if rebuilt is not None:
        rank, (size, tail) = members[rebuilt.member], version.sizes[rebuilt.member]
        first, end = max(rebuilt.start, size), min(rebuilt.start + rebuilt.data.numel(), size + tail)
        if first < end:
            data = rebuilt.data[first - rebuilt.start : end - rebuilt.start]
            pieces.append((rank, first, _bytes(data)))
    tails: dict[int, list[tuple[int, bytes]]] = {}
    for found in gather_bytes(encode(pieces), ranks.all):
        for rank, first, data in decode(found):
            tails.setdefault(rank, []).append((first, data))
    if rebuilt is not None:
        rank = members[rebuilt.member]
        theirs: Facts = decode(b"".join(data for _, data in sorted(tails[rank])))[0]
        stop = min(rebuilt.start + rebuilt.data.numel(), version.sizes[rebuilt.member].state)
        if rebuilt.start < stop:
            holdings.append(theirs.part(rebuilt.start, stop, rebuilt.data[: stop - rebuilt.start]))
    return holdings, state


def _bytes(data: torch.Tensor) -> bytes:
    return bytes(bytes_of(data.contiguous()))
