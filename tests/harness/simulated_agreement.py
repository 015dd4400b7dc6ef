"""The agreement of simulated ranks: the engine's own, on doubles of what it shares with other ranks.

What others answer is taken for granted where they can only say the same, and shows when what all did is played
(`simulated_waits`). What is not is which parameters others lack: whether any lacks some is known before the ranks end
their backwards, and the bits are compared afterwards.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

from flatfsdp.engine.agreement.agreement import Agreement
from flatfsdp.engine.agreement.op_sequence import Meetings, OpSequence
from flatfsdp.engine.agreement.ops import Op
from flatfsdp.engine.agreement.rank_exchange import RankExchange
from flatfsdp.engine.agreement.unused_params import UnusedParams, answer
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


class Store:
    """What ranks leave for each other."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}

    def append(self, key: str, text: str) -> None:
        self.texts[key] = self.texts.get(key, "") + text

    def read(self, key: str) -> str | None:
        return self.texts.get(key)

    def raise_alarm(self, alarm: str) -> None:
        """All ranks are asked in any case (`JobNotes.let_all_answer`)."""

    def wait(self, complete: Any, seconds: float) -> bool:
        return bool(complete())

    def count(self, key: str, step: int = 1) -> int:
        return 0


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
    unused: _Unused

    def __init__(self, peers: RankExchange, trace: Trace) -> None:
        super().__init__(peers)
        self.meetings = _Meetings(peers, trace)
        self.unused = _Unused(peers, trace)
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

    def end_backward(self, op: Op, lacking: int) -> int:
        self.unused.end = functools.cache(lambda: self._did(op))
        absent = super().end_backward(op, lacking)
        self.unused.end()
        return absent

    def _did(self, op: Op) -> None:
        self.unused.did(self.position - 1, op.code)
        self._trace.append("did", (self.position - 1, op.code))


class _Unused(UnusedParams):
    """What others lack is not waited for here, but where what all did is played.

    Attributes:
        bits: what this rank lacked in backwards with a bitmap, by their last places.
        end: the backward has come to its end.
    """

    def __init__(self, peers: RankExchange, trace: Trace) -> None:
        super().__init__(peers)
        self.bits: dict[int, int] = {}
        self.end: Callable[[], None] = lambda: None
        self._trace = trace
        self._did: tuple[int, int] = 0, 0

    def did(self, at: int, code: int) -> None:
        """The last op, at this place."""
        self._did = at, code

    def lacked_by_all(self, lacking: int) -> int:
        self.end()
        self.bits[self._did[0]] = lacking
        number = self._trace.issue(BITMAPS, self._did[0])
        if lacking:
            self._trace.append("await", (BITMAPS, number))
        return 0

    def found(self, bits: Sequence[dict[int, int]]) -> int:
        """What all ranks lacked in the last backward. `bits`: those of all ranks."""
        at = self._did[0]
        if at in self.bits:
            return functools.reduce(operator.and_, (each.get(at, 0) for each in bits))
        return functools.reduce(operator.and_, (lacks for lacks, _ in self._answers(at).values()))

    def ask(self, at: int, lacking: int) -> int:
        self.end()
        self._trace.append("meet", (*self._did, None))  # others are past this place, or ask themselves
        answer(self._peers.store, SCOPE, at, self._peers.rank, lacking, self._looks_from)
        self.asked.append(at)
        return 0


class SimulatedAgreement(Agreement):
    """That of one rank, which writes what it does to its `trace`."""

    sequence: _Sequence
    unused: _Unused

    def __init__(self, rank: int, job: JobNotes, units: Sequence[str], parameters: int) -> None:
        super().__init__(check_values="off")
        self.trace, peers = Trace(), self.peers
        self._job = job
        peers.rank, peers.ranks, peers.scope = rank, tuple(range(job.world)), SCOPE
        watch: Any = SimpleNamespace(
            store=job.store, add=lambda *_: None, follow=lambda *_: None, waiting=lambda *_, **__: nullcontext()
        )
        peers.watch = watch
        peers.exchange = self._exchange  # type: ignore[method-assign]
        self.sequence = _Sequence(peers, self.trace)
        self.unused = self.sequence.unused
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
        return {rank: [code, int(self._job.lacking[rank] > 0)] for rank in self.peers.ranks}

    def lacked_by_all(self, lacking: int) -> int:
        """What no rank brought gradients to in the backward that has ended, of what this one was `lacking`.

        Raises:
            AgreementError: some ranks have no such backward.
        """
        return self.unused.found([rank.unused.bits for rank in self._job.ranks]) if lacking else 0


class JobNotes:
    """What ranks of one job learn from each other about gradients that they lack.

    Attributes:
        lacking: the bits of each rank in the step that ends.
    """

    def __init__(self, world: int) -> None:
        self.world, self.store = world, Store()
        self.ranks: list[SimulatedAgreement] = []
        self.lacking = [0] * world

    def let_all_answer(self) -> None:
        """The watchdogs of all ranks consider what others ask."""
        for key in [*self.store.texts]:
            for rank in self.ranks:
                rank.unused.consider(SCOPE, int(key.rpartition("/")[2]), rank.sequence.position)
