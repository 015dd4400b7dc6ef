"""The agreement of simulated ranks: the engine's own, on doubles of what it shares with other ranks.

What others answer is taken for granted where they can only say the same, and shows when what all did is played
(`simulated_waits`). What is not is which parameters others lack: the bits of all ranks are compared when they have
ended their backwards.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

from flatfsdp.engine.agreement.agreement import Agreement
from flatfsdp.engine.agreement.op_sequence import Meetings, OpSequence
from flatfsdp.engine.agreement.ops import Op
from flatfsdp.engine.agreement.rank_exchange import RankExchange
from flatfsdp.engine.agreement.unused_params import UnusedParams
from flatfsdp.engine.base.events import EventLog
from flatfsdp.engine.base.peers import UnitEntry
from flatfsdp.engine.comm.comm_stats import CommStats
from tests.harness.simulated_waits import BITMAPS, GATHERS, REDUCTIONS, Stream

SCOPE = "model"


class Trace:
    """What one rank did.

    Attributes:
        counts: of collectives, by communicator. operations: in order, those of `simulated_waits`.
    """

    def __init__(self) -> None:
        self.operations: Stream = []
        self.counts = {GATHERS: 0, REDUCTIONS: 0, BITMAPS: 0}
        self.comm_stats = CommStats()

    def append(self, kind: str, what: Any = None) -> None:
        self.operations.append((kind, what))

    def issue(self, name: str, *what: str | int) -> int:
        """The number of this collective, for `what`, among those of its communicator."""
        number = self._count(name)
        self.append("issue", (name, number, what))
        return number

    def exchange(self, code: int) -> None:
        """On the communicator of gathers."""
        self.append("exchange", (self._count(GATHERS), code))

    def _count(self, name: str) -> int:
        number = self.counts[name]
        self.counts[name] += 1
        self.comm_stats.issued += 1
        return number


class _Meetings(Meetings):
    """Those of a rank that finds that all others do the same."""

    def __init__(self, peers: RankExchange, trace: Trace) -> None:
        super().__init__(peers)
        self._trace = trace
        self._announced: tuple[int, int, int | None] = 0, 0, None

    def announce(self, at: int, op: Op, *, issued: int | None = None) -> None:
        self._announced = at, op.code, issued
        self._trace.append("announce", (at, op.code))

    def meet(self, at: int, step: int) -> None:
        self._trace.append("meet", self._announced)


class _Sequence(OpSequence):
    def __init__(self, peers: RankExchange, trace: Trace) -> None:
        super().__init__(peers)
        self.meetings = _Meetings(peers, trace)
        self._trace = trace

    def start(self, part: str) -> None:
        super().start(part)
        self._trace.append("part")

    def next(self, op: Op, **how: Any) -> None:
        super().next(op, **how)
        self._did(op)

    def show(self, op: Op, **how: Any) -> None:
        super().show(op, **how)
        self._did(op)

    def _did(self, op: Op) -> None:
        self._trace.append("did", (self.position - 1, op.code))


class _Unused(UnusedParams):
    """What others lack is not waited for here, but where what all did is played: by the host, also where a device's
    would not wait.

    Attributes:
        bits: what this rank lacked, by the place at which its backward ended.
    """

    def __init__(self, peers: RankExchange, sequence: OpSequence, trace: Trace) -> None:
        super().__init__(peers)
        self.bits: dict[int, int] = {}
        self._sequence, self._trace = sequence, trace
        self._open: int | None = None  # the number of the last bitmap, if this rank did not wait for it

    def begin(self) -> None:
        self._await()

    def lacked_by_all(self, lacking: int) -> int:
        self.bits[self._sequence.position] = lacking
        self._open = self._trace.issue(BITMAPS, self._sequence.position)
        if lacking:
            self._await()
        return 0

    def _await(self) -> None:
        if self._open is not None:
            self._trace.append("await", (BITMAPS, self._open))
            self._open = None


class SimulatedAgreement(Agreement):
    """That of one rank, which writes what it does to its `trace`."""

    sequence: _Sequence
    unused: _Unused

    def __init__(self, rank: int, world: int, units: Sequence[str], parameters: int) -> None:
        super().__init__(check_values="off")
        self.trace, peers = Trace(), self.peers
        peers.rank, peers.ranks, peers.scope = rank, tuple(range(world)), SCOPE
        watch: Any = SimpleNamespace(
            store=None, add=lambda *_: None, follow=lambda *_: None, waiting=lambda *_, **__: nullcontext()
        )
        peers.watch = watch
        peers.exchange = self._exchange  # type: ignore[method-assign]
        self.sequence = _Sequence(peers, self.trace)
        self.unused = _Unused(peers, self.sequence, self.trace)
        self.rest, self.refuse, self.explain = self.sequence.rest, self.sequence.refuse, self.sequence.explain
        axes: Any = [SimpleNamespace(group=SimpleNamespace(ranks=peers.ranks, rank=rank))]
        entries = [UnitEntry(unit, range(i * parameters, (i + 1) * parameters)) for i, unit in enumerate(units)]
        stats = self.trace.comm_stats
        self.connect(axes, entries, tuple, gathers=(), sharded=True, comm_stats=stats, events=EventLog())
        self.sequence.connect()

    def check_backward(self, *plan: Any, **how: Any) -> None:
        self.trace.append("backward")
        super().check_backward(*plan, **how)

    def _exchange(self, code: int, *more: int) -> dict[int, list[int]]:
        self.trace.exchange(code)
        return {rank: [code, 0] for rank in self.peers.ranks}

    def lacked_by_all(self, lacking: int, job: Sequence[SimulatedAgreement]) -> int:
        """What no rank of the `job` brought gradients to in the backward that has ended, of what this one was
        `lacking`: what the bitmaps at its place say."""
        if not lacking:
            return 0
        at = max(self.unused.bits)
        return functools.reduce(operator.and_, [each.unused.bits.get(at, 0) for each in job])
