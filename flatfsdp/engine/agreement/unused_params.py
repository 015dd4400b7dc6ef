"""The agreement on parameters that no rank computed a gradient for, whose `.grad` then stays unchanged.

[Note: unused] A rank knows for which parameters it computed gradients, over all microbatches that are reduced together.
A rank that computed all of them needs no information about the others. A rank that lacks some has to know whether
another rank computed them: the reduced value may be 0 in either case.

So behind the last reduction of every backward ranks reduce a *bitmap*: a byte for each parameter, 1 on a rank that
computed its gradient, of which each rank gets the maximum. Only ranks that lack gradients wait for it. There is one in
every backward: a rule that leaves it out needs knowledge that only ranks that lack gradients have, and they would have
to ask the others, which may be several backwards ahead. A rank that finds at the end of its backward that ranks have
diverged takes part, too: others, whose operations were expected, have gone on, and their bitmap must not meet the next
collective of a program that catches the error.
"""

from __future__ import annotations

import contextlib

import torch

from ..base.per_group import for_group
from ..base.wait_limits import blocked
from ..comm.transport import Transport
from ..device.streams import Work
from ..transports.blocking import start_maximum
from .rank_exchange import RankExchange


class UnusedParams:
    """One rank's side of the agreement on parameters without gradients on any rank, for one model."""

    def __init__(self, peers: RankExchange) -> None:
        self._peers = peers
        self._count = 0
        self._ones: list[torch.Tensor] = []  # the bitmap of a rank that lacks nothing, for each axis
        self._works: list[Work] = []  # of the last bitmap, of a rank that did not wait for it

    def connect(self, count: int) -> None:
        """Set the number of the model's parameters. Its axes are known."""
        self._count, self._ones = count, []

    def begin(self) -> None:
        """A backward begins. Waits for the last bitmap."""
        if self._works:
            with blocked():
                while self._works:
                    self._works.pop().wait()

    def lacked_by_all(self, lacking: int) -> int:
        """Those parameters, of the ones that this rank is `lacking` a gradient for, that all ranks lack: a bit each.
        Collective over all axes; waits only if this rank lacks some."""
        axes, watch = self._peers.axes, self._peers.watch
        if not lacking:
            if not self._ones:
                self._ones = [_ones_of(axis, self._count) for axis in axes]
            self._works = [start_maximum(axis, ones) for axis, ones in zip(axes, self._ones, strict=True)]
            if watch is not None:  # ones are the maximum; others still need them if this process ends now
                watch.outlast(self._works)
            return 0
        came = [1 - (lacking >> index & 1) for index in range(self._count)]
        bitmap = torch.tensor(came, dtype=torch.uint8, device=axes[0].device.device)
        with blocked():
            for axis in axes:
                start_maximum(axis, bitmap).wait()
            if watch is None:  # of fake process groups: no other rank has gradients
                return lacking
            return sum((not used) << index for index, used in enumerate(bitmap.tolist()))

    def take_part(self) -> None:
        """Ranks have diverged, at the end of this backward or before: reduce the bitmap for those that wait for it."""
        with contextlib.suppress(RuntimeError):  # a connection broke: nobody waits
            self.lacked_by_all(0)


def _ones_of(axis: Transport, count: int) -> torch.Tensor:
    """The bitmap of ones of models with so many parameters. It is kept with the group: a collective for which nobody
    waits may use it when the model is gone."""
    kept: dict[int, torch.Tensor] = for_group(axis.group.process_group, ("ones", axis.device.device), dict)
    if count not in kept:
        kept[count] = torch.ones(count, dtype=torch.uint8, device=axis.device.device)
    return kept[count]
