"""Status polls: the current status of all ranks, requested and reported through the store.

[Note: status poll] A rank that has waited for too long, or has lost a connection, *polls* all ranks. The watch of each
rank answers with that rank's status; the polling rank collects the answers and posts the combined result for all. There
is one poll at a time: if several ranks want to poll, one wins, and the others use its result.

Each of W ranks posts one answer and counts it, and checks for the result twice per period until it is there, within
`ANSWER` periods. The polling rank reads 2 W notes and removes those of the poll before the last. The other ranks read
only one text, in which ranks with the same status share a line.

[Note: deadlock] A deadlock can be recognized if all ranks answer, all of them wait, and not all for one another in one
operation, which they would leave together. One such poll may have found ranks between two waits. A second one, after
the time of a report, that finds every rank in the same operation as the first is taken as proof. It is not proved if a
rank computes, compiles, reads data, or does not answer.

[Note: parted] If two ranks are in announced waits, each for ranks that include the other, a proof needs neither all
answers nor the time of a report. A rank may be slow to leave a wait, by seconds on a busy machine, while the others
already wait elsewhere. So each rank counts its entries of each wait: ranks have parted only if neither has reached the
other's wait. Two polls, `BETWEEN_POLLS` periods after each other, that find the same waits are taken as proof.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, cast, get_args

from ...errors import ranks_by_value, ranks_in_words
from ..base.foreign_text import parse
from ..base.processes import ProcessIdentity
from . import store as stores
from .store import StoreClient, launcher_serves_it, server_in_words

ANSWER = 5.0  # periods that ranks have for an answer: a watch shares its process with a program that may be busy
BETWEEN_POLLS = 1.0  # periods between two polls that prove that ranks have parted
ENTERED = 64  # waits in an answer: the last ones that a rank entered
REFUSALS = 5  # attempts after which the claim of a poll without an alarm is ignored
NORMALLY = "exited normally"
UNEVEN = ". Where ranks have different numbers of batches, take the steps inside `with flatfsdp.join(model) as joined`"
SKIPPED = "skipped a batch (as by `continue` before its forward), or its data ended earlier"
ALIKE = "Skip a batch on all ranks or on none"
MOST_RECORDS = 64  # ends of processes that a poll reads at most

# Purposes of a poll: ranks may wait in different places ("meet"); a wait is to be reported, or is to be an error, by
# the user's limit ("raise") or the process group's ("timeout"); a deadlock is to be proved; a connection was lost.
Purpose = Literal["meet", "report", "prove", "raise", "timeout", "lost"]
PURPOSES: tuple[str, ...] = get_args(Purpose)


@dataclass
class Progress:
    """How many steps and backwards a rank has begun with a model. A step is an outermost forward; a backward if nothing
    is sharded."""

    steps: int = 0
    backwards: int = 0


def numbers_of(progress: Mapping[str, Progress]) -> dict[str, tuple[int, int]]:
    """The steps and backwards with each model, by its name in the store, without models that did not begin a step."""
    return {scope: (each.steps, each.backwards) for scope, each in [*progress.items()] if each.steps}


def _numbers_in(found: Mapping[object, object]) -> dict[str, tuple[int, int]]:
    """The decoded result of `numbers_of`, without anything else."""
    numbers = {}
    for scope, pair in found.items():
        match scope, pair:
            case str(name), [int(steps), int(backwards)]:
                numbers[name] = steps, backwards
    return numbers


class RankStatus(NamedTuple):
    """The status of a rank.

    Attributes:
        doing: follows "rank 0: "; equal for ranks with the same status.
        seconds: the seconds since this status began.
        waits_for: in a wait that ends when several ranks have come to it: these ranks.
        stands: identifies its waits, by the times of their beginnings on its own clock; empty if it does anything else.
            Equal in two answers if the rank has not moved.
        entered: by the digest of a wait that ranks must all reach: its number of entries; the last waits only.
        progress: its steps and backwards with each model.
    """

    doing: str
    seconds: float
    waits_for: tuple[int, ...] = ()
    stands: tuple[float, ...] = ()
    entered: dict[str, int] = {}  # noqa: RUF012 (never written to)
    progress: dict[str, tuple[int, int]] = {}  # noqa: RUF012 (never written to)

    @classmethod
    def of(cls, text: str | None) -> RankStatus | None:
        """The answer that `text` has; None if it is not an answer."""
        match parse(text):
            case [
                str(doing),
                int(seconds) | float(seconds),
                [*waits_for],
                [*stands],
                dict(entered),
                dict(progress),
            ] if all(type(each) is int for each in (*waits_for, *entered.values())):
                since = tuple(each for each in stands if type(each) is float)
                return cls(doing, seconds, tuple(waits_for), since, entered, _numbers_in(progress))
        return None


class StatusReport(NamedTuple):
    """The result of a poll.

    Attributes:
        purpose: the purpose of the poll; by: the rank that polled.
        lines: the status of each rank, in words.
        lost: the exit records of ranks that ended.
        unresponsive: the processes of ranks that have used flatfsdp and do not answer.
        parted: the status of ranks that wait for each other in different places, or "". [Note: parted]
        parted_in: a digest of their waits, or "".
        answered: the number of ranks that answered.
        standing: if all ranks wait, in different places: a digest of these waits; or "".
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
        """The result that `text` has; None if it is not a result."""
        match parse(text):
            case [str(why), int(by), [*lines], [*lost], dict(gone), str(parted), str(wait), int(count), str(where)] if (
                why in PURPOSES
            ):
                words = [line for line in lines if isinstance(line, str)]
                ended = [each for each in map(ExitRecord.of, lost) if each is not None]
                processes = {
                    int(rank): process
                    for rank, each in gone.items()
                    if rank.isdecimal() and (process := ProcessIdentity.of(each)) is not None
                }
                return cls(cast(Purpose, why), by, words, ended, processes, parted, wait, count, where)
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
        self._since = stores.Moment.now()

    @property
    def period(self) -> float:
        """Seconds between two reads of the store by a watch."""
        return stores.PERIOD * max(1.0, self._world / stores.READS)

    @property
    def is_open(self) -> bool:
        """Whether this rank waits for a result."""
        return bool(self._open)

    def start(self, purpose: Purpose, *, alarms: int) -> None:
        """Poll all ranks, unless a poll is open. `alarms`: the number of alarms that this rank has received."""
        if self._open:
            return
        if alarms != self._refused_at:
            self._refused_at, self._refusals = alarms, 0
        # A rank that won the claim, but raised no alarm, has died.
        claim = f"claims/{alarms}/{self._refusals // REFUSALS}"
        if self._store.set_if_absent(claim, str(self._rank)) == str(self._rank):
            number = self._store.count("polls")
            self._store.raise_alarm(json.dumps(["poll", number, self._rank, purpose]))
            self._store.erase(f"claims/{alarms - 2}/0")
        else:
            self._refusals += 1

    def answer(self, number: int, by: int, purpose: Purpose, answer: RankStatus) -> None:
        """Answer poll `number` of rank `by`."""
        self._store.post(f"poll/{number}/{self._rank}", json.dumps(answer))
        self._store.count(f"poll/{number}/here")
        self._open.append(_OpenPoll(number, by, purpose, time.monotonic()))

    def results(self) -> Iterator[tuple[int, StatusReport]]:
        """The open polls that have a result now, by number; closes them."""
        for poll in list(self._open):
            waited = time.monotonic() - poll.began
            if poll.by == self._rank:
                self._collect(poll, late=waited > ANSWER * self.period)
            if (text := self._store.read(f"poll/{poll.number}/result")) is not None:
                self._open.remove(poll)
                if (result := StatusReport.of(text)) is not None:
                    yield poll.number, result
            elif waited > 2 * ANSWER * self.period:  # the polling rank has ended
                self._open.remove(poll)

    def let_all_read(self, prefix: str, readers: int | None = None) -> None:
        """`StoreClient.let_all_read`; `readers`: all ranks but one by default."""
        self._store.let_all_read(prefix, self._world - 1 if readers is None else readers, self.period * ANSWER / 2)

    def _collect(self, poll: _OpenPoll, *, late: bool) -> None:
        prefix = f"poll/{poll.number}"
        answered = self._store.count(f"{prefix}/here", 0)
        ended = ExitRecord.read_all(self._store)
        if answered + len(ended) < self._world and not late:
            return
        answers: dict[int, RankStatus] = {}
        unresponsive: dict[int, ProcessIdentity] = {}
        absent: list[int] = []
        for rank in range(self._world):
            if rank in ended:
                continue
            if (answer := RankStatus.of(self._store.read(f"{prefix}/{rank}"))) is not None:
                answers[rank] = answer
            elif (left := ExitRecord.left_after(self._since, self._store.read(f"left/{rank}"))) is not None:
                ended[rank] = left
            elif (process := ProcessIdentity.of(parse(self._store.read(f"here/{rank}")))) is not None:
                unresponsive[rank] = process
            else:
                absent.append(rank)
        if (unresponsive or absent) and not late:  # some ranks both answered and ended, and were counted twice
            return
        # A wait that is older than the poll existed while the others' did, even if ranks answered at different times.
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
                *([f"{ranks_in_words(absent)}: no use of flatfsdp yet"] if absent else []),
                *steps_behind({rank: answer.progress for rank, answer in answers.items()}),
            ],
            lost=[*ended.values()],
            unresponsive=unresponsive,
            parted="; ".join(f"{ranks_in_words(ranks)} {answers[ranks[0]].doing}" for ranks in stuck),
            parted_in=_digest([(rank, answers[rank].stands) for ranks in stuck for rank in ranks]) if stuck else "",
            answered=len(answers),
            standing=standing(answers) if len(answers) == self._world else "",
        )
        self._store.post(f"{prefix}/result", json.dumps(result))
        old = f"poll/{poll.number - 2}"
        self._store.erase(*(f"{old}/{each}" for each in (*range(self._world), "here", "result", "read")))


class ExitRecord(NamedTuple):
    """The record of the end of a rank's process.

    Attributes:
        words: complete "rank 0 ...".
        cause: the message of the disagreement with which it ended, which the others raise as well; or None.
        progress: its steps and backwards with each model.
    """

    rank: int
    words: str
    cause: str | None = None
    progress: dict[str, tuple[int, int]] = {}  # noqa: RUF012 (never written to)

    @property
    def is_normal(self) -> bool:
        """Whether the process ended without an error."""
        return self.words.startswith(NORMALLY)

    def publish(self, notes: StoreClient, *, alarm: bool) -> None:
        """Write the record to the store; with `alarm`, notify the watches of the other ranks."""
        number = notes.count("ended")
        notes.post(f"ended/{number}", json.dumps(self))
        if alarm:
            notes.raise_alarm(json.dumps(["ended", number]))

    @classmethod
    def read(cls, notes: StoreClient, number: int) -> ExitRecord | None:
        """The record with that `number`: from 1, in the order of ends."""
        return cls.of(parse(notes.read(f"ended/{number}")))

    @classmethod
    def of(cls, found: object) -> ExitRecord | None:
        """The record that was decoded to `found`; None if it is not one."""
        match found:
            case [int(rank), str(words), str() | None as cause, dict(progress)]:
                return cls(rank, words, cause, _numbers_in(progress))
        return None

    def left_now(self) -> str:
        """The text for `left/RANK` of a rank whose watch ends now, while its process continues."""
        return json.dumps(stores.Claim(json.dumps(self), stores.Moment.now()))

    @classmethod
    def left_after(cls, since: stores.Moment, text: str | None) -> ExitRecord | None:
        """The record that `left_now` has written; None for other texts, and for one from before `since`: the rank has
        destroyed an earlier process group, and may not have used this one yet."""
        left = stores.Claim.of(text or "")
        return None if left is None or left.at.is_before(since) else cls.of(parse(left.name))

    @classmethod
    def read_all(cls, notes: StoreClient) -> dict[int, ExitRecord]:
        """All records, by rank."""
        count = min(notes.count("ended", 0), MOST_RECORDS)
        found = [each for number in range(1, count + 1) if (each := cls.read(notes, number)) is not None]
        return {each.rank: each for each in sorted(found, key=lambda each: each.rank)}


def in_one_sentence(exit_records: Sequence[ExitRecord], progress: Mapping[str, Progress], *, rank: int) -> str:
    """The message for the remaining ranks about these `exit_records`; `progress` is that of this `rank`."""
    for each in exit_records:
        if each.cause is not None:
            return each.cause
    reported = "; ".join(f"rank {each.rank} {each.words}" for each in exit_records)
    uneven = [each for each in exit_records if each.is_normal]
    short = "".join(_short_of(each, numbers_of(progress), rank) for each in uneven)
    return f"{reported}.{short} The remaining ranks cannot continue{UNEVEN if uneven else ''}"


def _short_of(ended: ExitRecord, progress: Mapping[str, tuple[int, int]], rank: int) -> str:
    """The sentences on steps or backwards that a rank which `ended` normally had fewer of than this `rank`, whose
    `progress` that is; "" for none."""
    for scope, (steps, backwards) in progress.items():
        their_steps, their_backwards = ended.progress.get(scope, (steps, backwards))
        if their_steps < steps:
            return (
                f" It ran {their_steps} step{'s' if their_steps > 1 else ''} of the model, and rank {rank} is in step "
                f"{steps}: rank {ended.rank} {SKIPPED}. {ALIKE}."
            )
        if their_steps == steps and their_backwards < backwards:
            return (
                f" It ran {their_steps} step{'s' if their_steps > 1 else ''} of the model as rank {rank} did, but "
                f"{their_backwards} instead of {backwards} backwards: rank {ended.rank} skipped a backward (as by "
                "`continue` after a loss that is not finite). Run a backward on all ranks or on none."
            )
    return ""


def steps_behind(progress: Mapping[int, Mapping[str, tuple[int, int]]]) -> list[str]:
    """A line for each model with which ranks are in different steps. `progress`: by rank, the steps and backwards with
    each model."""
    lines = []
    for scope in dict.fromkeys(scope for each in progress.values() for scope in each):
        steps = {rank: each[scope][0] for rank, each in progress.items() if scope in each}
        if behind := sorted(rank for rank, count in steps.items() if count < max(steps.values())):
            lines.append(f"{ranks_in_words(behind)} did not begin the last step: late, or {SKIPPED}")
    return lines


def report_gone(notes: StoreClient, rank: int, process: ProcessIdentity, *, by: int) -> ExitRecord:
    """The record of a rank whose `process` ended without one. The first rank that calls this notifies all; `by`: this
    rank."""
    record = ExitRecord(rank, f"was killed, or crashed: {process} is gone")
    if notes.set_if_absent(f"gone/{rank}", str(by)) == str(by):
        record.publish(notes, alarm=True)
    return record


def server_ended() -> str:
    """The message for a lost store; if a rank served it, that may have run out of batches before the others."""
    return f"{server_in_words()} has ended{'' if launcher_serves_it() else UNEVEN}"


def lines_of(answers: dict[int, RankStatus]) -> list[str]:
    """One line for each group of ranks with the same status."""
    lines = []
    for doing, ranks in ranks_by_value({rank: answer.doing for rank, answer in answers.items()}).items():
        seconds = sorted(round(answers[rank].seconds) for rank in ranks)
        span = f"{seconds[0]}" if seconds[0] == seconds[-1] else f"{seconds[0]} to {seconds[-1]}"
        lines.append(f"{ranks_in_words(ranks)}: {doing}, for {span} s")
    return lines


def digest_of_wait(doing: str, waits_for: Sequence[int]) -> str:
    """The digest of a wait that ranks must all reach: the same on all of them."""
    return _digest((doing, tuple(waits_for)))


def parted(answers: dict[int, RankStatus], *, patience: float) -> list[list[int]]:
    """The ranks, by wait, that have waited for each other in different places for more than `patience` seconds."""
    waiting = {rank: answer for rank, answer in answers.items() if answer.waits_for and answer.seconds > patience}
    found = ranks_by_value({rank: (answer.doing, answer.waits_for) for rank, answer in waiting.items()})

    def entries(ranks: Sequence[int], awaited: Sequence[int], here: str, there: str) -> set[tuple[int, int]]:
        """The numbers of entries of `here` and of `there`, by each of `ranks` that is `awaited`."""
        counts = (waiting[rank].entered for rank in set(ranks) & set(awaited))
        return {(count.get(here, 0), count.get(there, 0)) for count in counts}

    def never_meet(wait: tuple[str, tuple[int, ...]], other: tuple[str, tuple[int, ...]]) -> bool:
        here, there = digest_of_wait(*wait), digest_of_wait(*other)
        theirs = entries(found[other], wait[1], there, here)
        return any(
            number > their_entries and their_number > entries_there
            for number, entries_there in entries(found[wait], other[1], here, there)
            for their_number, their_entries in theirs
        )

    return [ranks for here, ranks in found.items() if any(never_meet(here, each) for each in found if each != here)]


def standing(answers: dict[int, RankStatus]) -> str:
    """A digest of the waits of all ranks, if all wait, and not all in one operation; or "". [Note: deadlock]"""
    alike = len({answer.doing for answer in answers.values()}) == 1
    if alike or not all(answer.stands for answer in answers.values()):
        return ""
    return _digest([(rank, answer.doing, answer.stands) for rank, answer in sorted(answers.items())])


def _digest(what: object) -> str:
    return hashlib.blake2b(repr(what).encode(), digest_size=16).hexdigest()
