"""What all ranks do at this moment, requested and reported through the store.

[Note: status poll] A rank that waited for too long, or has lost a connection, *polls* all; the watch of each rank
answers with what that rank does, and the one that polls collects the answers, puts them together and posts the result
for all. There is one poll at a time: of those that want to poll, one wins, and the others take the result that comes.

Of W ranks each posts one answer and counts it, and looks for the result twice per period until it is there, within
`ANSWER` periods; who collects reads 2 W notes and removes those of the poll before the last. All that the others
read is one text in which ranks that do the same share a line.

[Note: deadlock] Whether ranks wait for each other for ever can be decided where all of them answer, none runs anything
but a wait, and they are not all in the same place, which they would leave together. One such poll may have met them on
their way. A second one, a report's time later, that finds every rank in the very same operation as the first is taken
as proof. A rank that computes, compiles, reads data, or does not answer forbids it.

[Note: parted] Two ranks with announced waits, each for ranks with the other among them, need neither answers of all nor
a report's time. A rank may be slow to leave a wait, by seconds on a busy machine, while the others wait elsewhere. So
each counts how often it has entered each wait: ranks have parted only where neither has come to what the other waits
in. Two polls, `APART` periods apart, that find the very same waits are taken as proof.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import time
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple, cast, get_args

from ...errors import ranks_by_value, ranks_in_words
from ..base.foreign_text import parse
from . import store as stores
from .start_name import state_of
from .store import StoreClient, launcher_serves_it, server_in_words

ANSWER = 5.0  # periods that ranks have for an answer: a watch shares its process with a program that may be busy
APART = 1.0  # periods between two polls that prove that ranks have parted
ENTERED = 64  # places of an answer: those that a rank entered last
REFUSALS = 5  # looks after which one that polled first, and reports nothing, counts for nothing
NORMALLY = "exited normally"
UNEVEN = ". Where ranks have different numbers of batches, take the steps inside `with flatfsdp.join(model) as joined`"
MOST_RECORDS = 64  # ends of processes that a poll reads at most

# Why a poll is held: what ranks wait for may never come ("meet"); a wait is to be reported, or to be an error, by what
# the user chose or by the time limit of the process group; a deadlock is to be proved; a connection was lost.
Purpose = Literal["meet", "report", "prove", "raise", "timeout", "lost"]
PURPOSES: tuple[str, ...] = get_args(Purpose)


class RankStatus(NamedTuple):
    """What a rank does.

    Attributes:
        doing: follows "rank 0: "; equal where ranks do the same.
        seconds: for how long it has.
        waits_for: in a wait for ranks that must all come to the same place: these ranks.
        stands: what it waits in, by since when by its own clock; nothing where it does anything else. The same as
            before where it has not moved.
        entered: by the digest of a place that ranks must all come to, how often it has: the last ones, and this one.
    """

    doing: str
    seconds: float
    waits_for: tuple[int, ...] = ()
    stands: tuple[float, ...] = ()
    entered: dict[str, int] = {}  # noqa: RUF012 (never written to)

    @classmethod
    def of(cls, text: str | None) -> RankStatus | None:
        """The answer of that `text`, None if it is none."""
        match parse(text):
            case [str(doing), int(seconds) | float(seconds), [*waits_for], [*stands], dict(entered)] if all(
                type(each) is int for each in (*waits_for, *entered.values())
            ):
                since = tuple(each for each in stands if type(each) is float)
                return cls(doing, seconds, tuple(waits_for), since, entered)
        return None


class ProcessIdentity(NamedTuple):
    """A process as others on its machine can find it."""

    pid: int
    host: str
    namespace: str  # of process ids
    started: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"

    @classmethod
    def this(cls) -> ProcessIdentity:
        """This one."""
        return cls(os.getpid(), socket.gethostname(), _namespace(), state_of(os.getpid())[1])

    @classmethod
    def of(cls, found: object) -> ProcessIdentity | None:
        """The process that these values are, None if they are none."""
        match found:
            case [int(pid), str(host), str(namespace), str(started)]:
                return cls(pid, host, namespace, started)
        return None

    def is_gone(self) -> bool | None:
        """Whether it has ended; None where that cannot be seen from here, of other machines or without Linux."""
        if not self.started or (self.host, self.namespace) != (socket.gethostname(), _namespace()):
            return None
        state, started = state_of(self.pid)
        return state in "ZX" or started != self.started


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


class StatusReport(NamedTuple):
    """What a poll brought to light.

    Attributes:
        purpose: why it was held; by: by whom.
        lines: what each rank does, in words.
        lost: the exit records of ranks that ended.
        unresponsive: the processes of ranks that began with flatfsdp and do not answer.
        parted: what ranks do that wait for each other in different places, or "". [Note: parted]
        parted_in: what stands for their waits, or "".
        answered: how many ranks answered.
        standing: where all ranks wait, in different places: what stands for where each of them is; or "".
    """

    purpose: Purpose
    by: int
    lines: list[str]
    lost: list[ExitRecord]
    unresponsive: dict[int, ProcessIdentity]
    parted: str
    parted_in: str
    answered: int
    standing: str

    @classmethod
    def of(cls, text: str) -> StatusReport | None:
        """The result of that `text`, None if it is none."""
        match parse(text):
            case [str(why), int(by), [*lines], [*lost], dict(gone), str(parted), str(part), int(count), str(where)] if (
                why in PURPOSES
            ):
                words = [line for line in lines if isinstance(line, str)]
                ended = [each for each in map(ExitRecord.of, lost) if each is not None]
                processes = {
                    int(rank): process
                    for rank, each in gone.items()
                    if rank.isdecimal() and (process := ProcessIdentity.of(each)) is not None
                }
                return cls(cast(Purpose, why), by, words, ended, processes, parted, part, count, where)
        return None


class _OpenPoll(NamedTuple):
    """A poll without a result."""

    number: int
    by: int
    purpose: Purpose
    began: float


class StatusPoll:
    """One rank's side of the polls of a world. [Note: status poll]"""

    def __init__(self, notes: StoreClient, *, rank: int, world: int) -> None:
        self._store = notes
        self._rank = rank
        self._world = world
        self._open: list[_OpenPoll] = []
        self._refused_at, self._refusals = 0, 0

    @property
    def period(self) -> float:
        """Seconds between two looks of a watch at the store."""
        return stores.PERIOD * max(1.0, self._world / stores.READS)

    @property
    def is_open(self) -> bool:
        """Whether a result is awaited."""
        return bool(self._open)

    def start(self, purpose: Purpose, *, alarms: int) -> None:
        """Poll all ranks, unless somebody does. `alarms`: the alarms that this rank knows of."""
        if self._open:
            return
        if alarms != self._refused_at:
            self._refused_at, self._refusals = alarms, 0
        # A rank that won, and raised no alarm, has died at once.
        claim = f"claims/{alarms}/{self._refusals // REFUSALS}"
        if self._store.set_if_absent(claim, str(self._rank)) == str(self._rank):
            number = self._store.count("polls")
            self._store.raise_alarm(json.dumps(["poll", number, self._rank, purpose]))
            self._store.erase(f"claims/{alarms - 2}/0")
        else:
            self._refusals += 1

    def answer(self, number: int, by: int, purpose: Purpose, answer: RankStatus) -> None:
        """Poll `number` was noticed: answer it."""
        self._store.post(f"poll/{number}/{self._rank}", json.dumps(answer))
        self._store.count(f"poll/{number}/here")
        self._open.append(_OpenPoll(number, by, purpose, time.monotonic()))

    def results(self) -> Iterator[tuple[int, StatusReport]]:
        """The polls, by number, that have a result now."""
        for poll in list(self._open):
            waited = time.monotonic() - poll.began
            if poll.by == self._rank:
                self._collect(poll, late=waited > ANSWER * self.period)
            if (text := self._store.read(f"poll/{poll.number}/result")) is not None:
                self._open.remove(poll)
                if (result := StatusReport.of(text)) is not None:
                    yield poll.number, result
            elif waited > 2 * ANSWER * self.period:  # who polled has ended
                self._open.remove(poll)

    def let_all_read(self, place: str, readers: int | None = None) -> None:
        """As of the store; `readers`: all ranks but one without."""
        self._store.let_all_read(place, self._world - 1 if readers is None else readers, self.period * ANSWER / 2)

    def _collect(self, poll: _OpenPoll, *, late: bool) -> None:
        place = f"poll/{poll.number}"
        answered = self._store.count(f"{place}/here", 0)
        ended = ExitRecord.read_all(self._store)
        if answered + len(ended) < self._world and not late:
            return
        answers: dict[int, RankStatus] = {}
        unresponsive: dict[int, ProcessIdentity] = {}
        absent: list[int] = []
        for rank in range(self._world):
            if rank in ended:
                continue
            if (answer := RankStatus.of(self._store.read(f"{place}/{rank}"))) is not None:
                answers[rank] = answer
            elif (process := ProcessIdentity.of(parse(self._store.read(f"here/{rank}")))) is not None:
                unresponsive[rank] = process
            else:
                absent.append(rank)
        if (unresponsive or absent) and not late:  # some answered and ended
            return
        # A wait that is older than the poll was there when all others' were, however far apart ranks answered.
        stuck = parted(answers, patience=2 * self.period + time.monotonic() - poll.began)
        result = StatusReport(
            poll.purpose,
            poll.by,
            lines=[
                *lines_of(answers),
                *(f"rank {rank}: {each.words}" for rank, each in ended.items()),
                *(
                    f"rank {rank}: no response: {process} exited, is stopped, or no longer holds a model"
                    for rank, process in unresponsive.items()
                ),
                *([f"{ranks_in_words(absent)}: has not used flatfsdp yet"] if absent else []),
            ],
            lost=[*ended.values()],
            unresponsive=unresponsive,
            parted="; ".join(f"{ranks_in_words(ranks)} {answers[ranks[0]].doing}" for ranks in stuck),
            parted_in=_digest([(rank, answers[rank].stands) for ranks in stuck for rank in ranks]) if stuck else "",
            answered=len(answers),
            standing=standing(answers) if len(answers) == self._world else "",
        )
        self._store.post(f"{place}/result", json.dumps(result))
        old = f"poll/{poll.number - 2}"
        self._store.erase(*(f"{old}/{each}" for each in (*range(self._world), "here", "result", "read")))


class ExitRecord(NamedTuple):
    """How a rank's process ended.

    Attributes:
        words: complete "rank 0 ...".
        cause: the disagreement that it ended with, in the words that the others are to get, or None.
    """

    rank: int
    words: str
    cause: str | None = None

    def publish(self, notes: StoreClient, *, alarm: bool) -> None:
        """Write it down, for the watches of the others with `alarm`."""
        number = notes.count("ended")
        notes.post(f"ended/{number}", json.dumps(self))
        if alarm:
            notes.raise_alarm(json.dumps(["ended", number]))

    @classmethod
    def read(cls, notes: StoreClient, number: int) -> ExitRecord | None:
        """The one of that `number`, from 1 on in the order of ends."""
        return cls.of(parse(notes.read(f"ended/{number}")))

    @classmethod
    def of(cls, found: object) -> ExitRecord | None:
        """The one that these values are, None if they are none."""
        match found:
            case [int(rank), str(words), str() | None as cause]:
                return cls(rank, words, cause)
        return None

    @classmethod
    def read_all(cls, notes: StoreClient) -> dict[int, ExitRecord]:
        """All, by rank."""
        count = min(notes.count("ended", 0), MOST_RECORDS)
        found = [each for number in range(1, count + 1) if (each := cls.read(notes, number)) is not None]
        return {each.rank: each for each in sorted(found, key=lambda each: each.rank)}


def in_one_sentence(exit_records: Sequence[ExitRecord]) -> str:
    """Whose end the remaining ranks cannot continue after."""
    for each in exit_records:
        if each.cause is not None:
            return each.cause
    reported = "; ".join(f"rank {each.rank} {each.words}" for each in exit_records)
    uneven = any(each.words.startswith(NORMALLY) for each in exit_records)
    return f"{reported}. The remaining ranks cannot continue{UNEVEN if uneven else ''}"


def server_ended() -> str:
    """A rank that took the store with it could not report how it ended: out of batches before the others, it may be."""
    return f"{server_in_words()} has ended{'' if launcher_serves_it() else UNEVEN}"


def lines_of(answers: dict[int, RankStatus]) -> list[str]:
    """One line for all ranks that do the same."""
    lines = []
    for doing, ranks in ranks_by_value({rank: answer.doing for rank, answer in answers.items()}).items():
        seconds = sorted(round(answers[rank].seconds) for rank in ranks)
        span = f"{seconds[0]}" if seconds[0] == seconds[-1] else f"{seconds[0]} to {seconds[-1]}"
        lines.append(f"{ranks_in_words(ranks)}: {doing}, for {span} s")
    return lines


def name_of_place(doing: str, waits_for: Sequence[int]) -> str:
    """The digest of a place that ranks must all come to: the same on all of them."""
    return _digest((doing, tuple(waits_for)))


def parted(answers: dict[int, RankStatus], *, patience: float) -> list[list[int]]:
    """The ranks, by place, that have waited for each other, in different places, for more than `patience` seconds."""
    waiting = {rank: answer for rank, answer in answers.items() if answer.waits_for and answer.seconds > patience}
    places = ranks_by_value({rank: (answer.doing, answer.waits_for) for rank, answer in waiting.items()})

    def entries(ranks: Sequence[int], awaited: Sequence[int], here: str, there: str) -> set[tuple[int, int]]:
        """How often those of `ranks` that are `awaited` have entered the place where they are, and another."""
        counts = (waiting[rank].entered for rank in set(ranks) & set(awaited))
        return {(count.get(here, 0), count.get(there, 0)) for count in counts}

    def never_meet(place: tuple[str, tuple[int, ...]], other: tuple[str, tuple[int, ...]]) -> bool:
        here, there = name_of_place(*place), name_of_place(*other)
        theirs = entries(places[other], place[1], there, here)
        return any(
            number > their_entries and their_number > entries_there
            for number, entries_there in entries(places[place], other[1], here, there)
            for their_number, their_entries in theirs
        )

    return [ranks for here, ranks in places.items() if any(never_meet(here, each) for each in places if each != here)]


def standing(answers: dict[int, RankStatus]) -> str:
    """What stands for where ranks are that all wait, in different places; or "". [Note: deadlock]"""
    alike = len({answer.doing for answer in answers.values()}) == 1
    if alike or not all(answer.stands for answer in answers.values()):
        return ""
    return _digest([(rank, answer.doing, answer.stands) for rank, answer in sorted(answers.items())])


def _digest(what: object) -> str:
    return hashlib.blake2b(repr(what).encode(), digest_size=16).hexdigest()
