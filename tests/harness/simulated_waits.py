"""Who waits for whom: what hosts and devices of several ranks do, each in its order, played against each other.

What a rank does is a list of operations, each a kind and what it is of:

- "issue" a collective: the name of a communicator, a number, and what it is for; "await" it: the first two
- "exchange", a collective for which the host waits: a number, and the code that is compared
- "free" a unit; "follow": what is gathered from here on comes after what was computed
- "part": one of an iteration begins
- "did": a place in the sequence, and the code of what all ranks do there
- "announce": the same, of which others may not know
- "meet": as "did", and how many collectives were issued where no more will be; the host leaves a note, and waits for
  what the others do there

Watchdogs answer for ranks that are past a place, and where one waits that will issue no more, for those that have
issued more (`OpSequence.consider`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

Stream = list[tuple[str, Any]]
GATHERS, REDUCTIONS, BITMAPS = "gather", "reduce", "bitmap"
EXCHANGE = "what ranks compare"


class Problem(AssertionError):
    """What a program of a user would notice."""


class Differ(Exception):
    """All ranks get an error, which names what they did."""


class Ways(Protocol):
    """Makes streams of what a rank does, the first that of its host."""

    def __call__(self, operations: Stream, /) -> list[Stream]: ...


def on_host(operations: Stream) -> list[Stream]:
    """The host itself waits, as with gloo."""
    host: Stream = []
    for kind, what in operations:
        if kind == "exchange":
            host += [("exchange", what), ("await", (GATHERS, what[0]))]
        elif kind not in ("free", "follow"):
            host.append((kind, what))
    return [host]


def on_device(operations: Stream) -> list[Stream]:
    """Streams wait, and a gather for the memory of all that was freed when the host issued it. The host waits where
    ranks compare what they do."""
    streams: list[Stream] = [[], [], [], []]
    host, compute, unshard, reduce = streams
    marks = 0

    def after(one: Stream, *others: Stream) -> None:
        nonlocal marks
        marks += 1
        one.append(("mark", marks))
        for each in others:
            each.append(("after", marks))

    for kind, what in operations:
        if kind in ("free", "follow"):
            after(compute, unshard)
        elif kind == "exchange":
            after(compute, unshard)
            awaited = "await", (GATHERS, what[0])
            unshard += [("exchange", what), awaited]
            compute.append(awaited)
            host += [("count", None), awaited]
            after(host, compute, unshard, reduce)
        elif kind == "await":
            compute.append((kind, what))
            if what[0] == BITMAPS:
                after(compute, host)
        elif kind == "issue":
            stream = unshard if what[0] == GATHERS else reduce
            if stream is reduce:
                after(compute, reduce)
            stream += [(kind, what), ("await", what[:2])]
            host += [("count", None)] if what[0] != BITMAPS else []
        else:
            host.append((kind, what))
            if kind == "meet":
                after(host, compute, unshard, reduce)
    return streams


class _Host:
    """How far one rank has come, as others may learn."""

    def __init__(self) -> None:
        self.did: dict[int, int] = {}  # by place
        self.noted: dict[int, int] = {}
        self.ended: dict[int, int] = {}  # by place, how many collectives it had issued there, where it issues no more
        self.position = self.issued = 0
        self.marked: set[int] = set()


class Play:
    """Streams of all ranks, the first of each that of its host."""

    def __init__(self, ranks: Sequence[list[Stream]]) -> None:
        self._ranks = ranks
        self._heads = [[0] * len(streams) for streams in ranks]
        self._hosts = [_Host() for _ in ranks]
        self._meaning: dict[tuple[str, int], Any] = {}  # of collectives
        self._issued: dict[tuple[str, int], set[int]] = {}
        self._codes: dict[int, set[int]] = {}  # of exchanges

    def run(self) -> str:
        """How ranks differ, of which all learn; "" if all come to their end.

        Raises:
            Problem: some wait for ever, or collectives meet that are not the same.
        """
        try:
            while any(
                [self._advance(number, at) for number, ways in enumerate(self._ranks) for at in range(len(ways))]
            ):
                pass
            stuck = [
                f"rank {number} at {streams[at][head]}"
                for number, streams in enumerate(self._ranks)
                for at, head in enumerate(self._heads[number])
                if head < len(streams[at])
            ]
            if stuck:
                self._consider()
                raise Problem(f"deadlock: {'; '.join(stuck)}")
        except Differ as found:
            return str(found)
        return ""

    def _advance(self, number: int, at: int) -> bool:
        stream, heads = self._ranks[number][at], self._heads[number]
        began = heads[at]
        while heads[at] < len(stream) and self._may_go_on(number, *stream[heads[at]], on_host=at == 0):
            heads[at] += 1
        return heads[at] > began

    def _may_go_on(self, number: int, kind: str, what: Any, *, on_host: bool) -> bool:
        host = self._hosts[number]
        if kind in ("issue", "exchange"):
            if on_host and (kind == "exchange" or what[0] != BITMAPS):
                host.issued += 1
            if kind == "exchange":
                self._codes.setdefault(what[0], set()).add(what[1])
                what = GATHERS, what[0], EXCHANGE
            return self._issue(number, *what)
        match kind:
            case "await":
                return self._is_there(what)
            case "mark":
                host.marked.add(what)
            case "after":
                return what in host.marked
            case "count":
                host.issued += 1
            case "part":
                host.issued = 0
            case "announce":
                host.noted[what[0]] = what[1]
            case "did":
                host.did[what[0]] = what[1]
                host.position = what[0] + 1
            case "meet":
                return self._have_met(number, *what)
        return True

    def _issue(self, number: int, name: str, count: int, meaning: Any) -> bool:
        if (other := self._meaning.setdefault((name, count), meaning)) != meaning:
            raise Problem(f"{name} {count} is of {other}, on rank {number} of {meaning}")
        self._issued.setdefault((name, count), set()).add(number)
        return True

    def _is_there(self, what: tuple[str, int]) -> bool:
        if len(self._issued.get(what, ())) < len(self._ranks):
            return False
        if self._meaning[what] == EXCHANGE and len(self._codes[what[1]]) > 1:
            raise Differ(f"exchange {what[1]}")
        return True

    def _consider(self) -> None:
        """What watchdogs find where ranks wait."""
        for host in self._hosts:
            at = host.position
            if any(host.issued > each.ended.get(at, host.issued) for each in self._hosts):
                raise Differ(f"one issues no more at {at}, and another one went on")

    def _have_met(self, number: int, place: int, code: int, issued: int | None) -> bool:
        if issued is not None:
            self._hosts[number].ended[place] = issued
        here = True
        for other in self._hosts:
            found = other.did.get(place, other.noted.get(place))
            if found is None:
                here = False
            elif found != code:
                raise Differ(f"notes at {place}")
        return here
