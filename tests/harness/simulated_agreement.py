"""The agreement of simulated ranks: the engine's own, on doubles of what it shares with other ranks.

What others answer is taken for granted where they can only say the same, and shows when what all did is played
(`simulated_waits`). What is not is which parameters others lack: `UnusedParams` is asked when all ranks have come to
the end of a backward, in any order, and again when all have answered.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from flatfsdp.engine.agreement.agreement import Agreement
from flatfsdp.engine.agreement.divergence import ModelNames
from flatfsdp.engine.agreement.op_sequence import Meetings, OpSequence
from flatfsdp.engine.agreement.ops import Op, UnitEntry
from flatfsdp.engine.agreement.rank_exchange import RankExchange
from flatfsdp.engine.agreement.unused_params import UnusedAnswers, UnusedParams, entries_in
from flatfsdp.engine.base.events import EventLog
from flatfsdp.engine.comm.comm_stats import CommStats
from tests.harness.simulated_waits import GATHERS, LACKS, REDUCTIONS, Stream

SCOPE = "model"


class Waits(BaseException):
    """A rank waits for what others lacked in a backward."""


class Trace:
    """What one rank did.

    Attributes:
        counts: of collectives, by communicator. operations: in order, those of `simulated_waits`.
    """

    def __init__(self) -> None:
        self.operations: Stream = []
        self.counts = {GATHERS: 0, REDUCTIONS: 0}
        self.comm_stats = CommStats()

    def append(self, kind: str, what: Any = None) -> None:
        self.operations.append((kind, what))

    def issue(self, name: str, units: Sequence[str]) -> int:
        """The number of this collective among those of its communicator."""
        number = self._count(name)
        self.append("issue", (name, number, tuple(units)))
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

    def erase(self, *keys: str) -> None:
        for key in keys:
            self.texts.pop(key, None)


class _Meetings(Meetings):
    """Those of a rank that finds that all others do the same."""

    def __init__(self, peers: RankExchange, trace: Trace) -> None:
        super().__init__(peers)
        self._trace = trace
        self._announced: tuple[int, int, int | None] = 0, 0, None

    def announce(self, at: int, op: Op, *, issued: int | None = None) -> None:
        self._announced = at, op.code, issued
        self._trace.append("announce", (at, op.code))

    def announce_end(self, at: int, issued: int) -> None:
        self._announced = at, self._announced[1], issued

    def meet(self, at: int, step: int) -> None:
        self._trace.append("meet", self._announced)


class _Sequence(OpSequence):
    def __init__(self, peers: RankExchange, trace: Trace, job: JobNotes) -> None:
        super().__init__(peers)
        self.meetings = _Meetings(peers, trace)
        self.unused = _Unused(peers, job)
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

    def announce(self, op: Op) -> None:
        super().announce(op)
        if self.announced is None:
            self._did(op)

    def meet_announced(self) -> None:
        op = self.announced
        super().meet_announced()
        if op is not None:
            self._did(op)

    def _did(self, op: Op) -> None:
        self._trace.append("did", (self.position - 1, op.code))


class _Answers(UnusedAnswers):
    """They answer the same where a rank that waits is asked again."""

    def __init__(self) -> None:
        super().__init__()
        self._decided: dict[int, bool] = {}

    def record(self, at: int, kind: int, lacking: int, **how: Any) -> bool:
        if at not in self._decided:
            self._decided[at] = super().record(at, kind, lacking, **how)
        return self._decided[at]

    def has_decided(self, at: int) -> bool:
        """Whether it was settled if this rank waits for others in the backward at this place."""
        return at in self._decided

    def takes_part(self, at: int) -> bool:
        """Whether it does."""
        return self._decided.get(at, False)


class _Unused(UnusedParams):
    answers: _Answers

    def __init__(self, peers: RankExchange, job: JobNotes) -> None:
        super().__init__(peers)
        self.answers = _Answers()
        self._job = job

    @property
    def place(self) -> int:
        """Of the backward that runs."""
        return self._at

    def _publish(self, key: str, entry: str, what: str, **how: Any) -> dict[int, tuple[int, bool]]:
        store = self._job.store
        store.append(key, entry)
        if how.get("calls"):
            self._job.call(self._at)  # whose watchdogs answer
        found = entries_in(store.read(key) or "")
        if len(found) < len(self._peers.ranks) and not how.get("calls"):
            raise Waits
        return found


class SimulatedAgreement(Agreement):
    """That of one rank, which writes what it does to its `trace`."""

    sequence: _Sequence
    unused: _Unused

    def __init__(self, rank: int, job: JobNotes, units: Sequence[str], parameters: int) -> None:
        super().__init__(check_values="off")
        self.trace, peers = Trace(), self.peers
        peers.ranks, peers.scope = tuple(range(job.world)), SCOPE
        watch: Any = SimpleNamespace(store=job.store, add=lambda *_: None, follow=lambda *_: None)
        peers.watch = watch
        peers.exchange = self._exchange  # type: ignore[method-assign]
        self.sequence = _Sequence(peers, self.trace, job)
        self.unused = self.sequence.unused
        self.rest, self.refuse, self.explain = self.sequence.rest, self.sequence.refuse, self.sequence.explain
        axes: Any = [SimpleNamespace(group=SimpleNamespace(ranks=peers.ranks, rank=rank))]
        entries = [UnitEntry(unit, range(i * parameters, (i + 1) * parameters)) for i, unit in enumerate(units)]
        self.connect(axes, ModelNames(entries), sharded=True, comm_stats=self.trace.comm_stats, events=EventLog())
        self.sequence.connect()

    def check_backward(self, *plan: Any, **how: Any) -> None:
        self.trace.append("backward")
        super().check_backward(*plan, **how)

    def check_gradients(self, *, came: bool) -> None:
        if came:
            self.trace.append("came")
        super().check_gradients(came=came)

    def _exchange(self, code: int, *more: int) -> None:
        self.trace.exchange(code)

    def lacked_by_all(self, lacking: int) -> int:
        """What no rank brought gradients to in the backward that ends.

        Raises:
            Waits: that is not known yet.
        """
        unused = self.unused
        first = not unused.answers.has_decided(unused.place)
        try:
            return unused.lacked_by_all(lacking)
        finally:
            if first:
                self.trace.append("issue", (LACKS, unused.place, ()))
                if unused.answers.takes_part(unused.place):
                    self.trace.append("await", (LACKS, unused.place))


class JobNotes:
    """What ranks of one job learn from each other about gradients that they lack.

    Attributes:
        hosts_wait: whether no rank comes to the end of a backward before another one has called.
    """

    def __init__(self, world: int, *, hosts_wait: bool) -> None:
        self.world, self.hosts_wait, self.store = world, hosts_wait, Store()
        self.ranks: list[SimulatedAgreement] = []
        self._late: list[int] = []

    def request(self, at: int, *, calls: bool = False) -> None:
        """The watchdogs of all ranks consider that one lacks gradients in the backward at this place."""
        for rank in self.ranks:
            rank.unused.answers.consider(SCOPE, at, calls)

    def call(self, at: int) -> None:
        """A rank is about to take part in a reduction, and lacks what others do not expect."""
        if self.hosts_wait:
            self.request(at, calls=True)
        else:
            self._late.append(at)

    def deliver(self) -> None:
        """The calls that nobody had to wait for."""
        for at in self._late:
            self.request(at, calls=True)
        self._late.clear()
