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
import weakref
from typing import Any

import torch

from ..base.per_group import for_group, known_for_group
from ..base.wait_limits import blocked
from ..device.streams import Work
from ..transports.blocking import start_maximum
from .rank_exchange import RankExchange

_KEY = "bitmaps"  # of a process group


class GroupBitmaps:
    """The bitmaps that this rank has reduced over one process group, for all models.

    Attributes:
        issued: their number.
    """

    def __init__(self) -> None:
        self.issued = 0
        self._ones: dict[tuple[torch.device, int], torch.Tensor] = {}

    def ones(self, device: torch.device, count: int) -> torch.Tensor:
        """The bitmap of a rank that lacks nothing of so many parameters. It lives as long as the group: a collective
        for which nobody waits may use it when the model is gone."""
        if (device, count) not in self._ones:
            self._ones[device, count] = torch.ones(count, dtype=torch.uint8, device=device)
        return self._ones[device, count]


def bitmaps_in(process_group: Any) -> str:
    """The bitmaps that this rank has reduced over `process_group`, in words. Not collective."""
    issued = known_for_group(process_group, _KEY, lambda found: found.issued) or 0
    return f"{issued} bitmaps of gradients in group {process_group.group_name}"


class UnusedParams:
    """One rank's side of the agreement on parameters without gradients on any rank, for one model."""

    def __init__(self, peers: RankExchange) -> None:
        self._peers = peers
        found = weakref.ref(peers)  # the watch keeps what follows, and must not keep groups
        self.diverged = lambda: (peers := found()) is not None and peers.verdict
        self._count = 0
        self._over: list[GroupBitmaps] = []  # of each axis
        self._ones: list[torch.Tensor] = []  # the bitmap of a rank that lacks nothing, for each axis
        self._works: list[Work] = []  # of the last bitmap, of a rank that did not wait for it

    def connect(self, count: int) -> None:
        """Set the number of the model's parameters. Its axes are known."""
        self._count, self._over, self._ones = count, [], []

    def begin(self) -> None:
        """A backward begins. Waits for the last bitmap, unless ranks have diverged: some may never reduce it."""
        if self._peers.verdict is not None:
            self._peers.raise_verdict()
        if self._works:
            with blocked():
                while self._works:
                    self._works.pop().wait()

    def lacked_by_all(self, lacking: int) -> int:
        """Those parameters, of the ones that this rank is `lacking` a gradient for, that all ranks lack: a bit each.
        Collective over all axes; waits only if this rank lacks some."""
        axes, watch = self._peers.axes, self._peers.watch
        if not self._over:
            self._over = [for_group(axis.group.process_group, _KEY, GroupBitmaps) for axis in axes]
            self._ones = [
                each.ones(axis.device.device, self._count) for axis, each in zip(axes, self._over, strict=True)
            ]
        for each in self._over:
            each.issued += 1
        if not lacking:
            self._works = [start_maximum(axis, ones) for axis, ones in zip(axes, self._ones, strict=True)]
            if watch is not None:  # ones are the maximum; others still need them if this process ends now
                watch.outlast(self._works, self.diverged)
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
