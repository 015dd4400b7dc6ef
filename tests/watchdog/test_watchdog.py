"""Watches of many ranks over one store in memory: the printed messages, and the number of requests."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest

import flatfsdp
from flatfsdp.engine.base import wait_limits as waits
from flatfsdp.engine.base.processes import ProcessIdentity
from flatfsdp.engine.watchdog import store as stores
from flatfsdp.engine.watchdog import watchdog as watch
from flatfsdp.engine.watchdog.local_waits import Timekeeper
from flatfsdp.engine.watchdog.status_report import (
    ANSWER,
    ExitRecord,
    Progress,
    RankStatus,
    StatusPoll,
    digest_of_wait,
    lines_of,
    parted,
)
from flatfsdp.engine.watchdog.store import StoreGone
from flatfsdp.engine.watchdog.watchdog import Watchdog
from flatfsdp.errors import AgreementError, ConfigTypeError, ConfigValueError, LostRankError, WaitError, ranks_in_words

pytestmark = pytest.mark.unit


class Notes(stores.StoreClient):
    """A stores of one process that counts the requests of one rank."""

    def __init__(self, shared: dict[str, str]) -> None:
        super().__init__(shared)
        self._shared = shared
        self.requests = 0
        self.is_gone = False

    def _ask(self) -> dict[str, str]:
        if self.is_gone:
            raise StoreGone("gone")
        self.requests += 1
        return self._shared

    def post(self, key: str, text: str) -> None:
        self._ask()[key] = text

    def read(self, key: str) -> str | None:
        return self._ask().get(key)

    def set_if_absent(self, key: str, text: str) -> str:
        return self._ask().setdefault(key, text)

    def count(self, key: str, step: int = 1) -> int:
        found = self._ask()
        found[key] = str(int(found.get(key, 0)) + step)
        return int(found[key])

    def erase(self, *keys: str) -> None:
        for key in keys:
            self._ask().pop(key, None)


class Model:
    """Some ranks' model, as a watch sees it."""

    busy = False
    doing = ("in the program's own code since a backward in step 3", 0.0)
    time_limit = math.inf
    last_step = ", after a backward in step 3"

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = ranks
        self.progress = Progress()
        self.error: AgreementError | None = None

    def consider(self, alarm: str) -> bool:
        return True

    def fail(self, error: AgreementError, ranks: Sequence[int] | None) -> bool:
        concerned = ranks is None or not set(ranks).isdisjoint(self.ranks)
        self.error = self.error or (error if concerned else None)
        return concerned


class World:
    """The watches of `size` ranks, without threads: they look when a test calls `look`."""

    def __init__(self, size: int) -> None:
        self.shared: dict[str, str] = {}
        self.notes = [Notes(self.shared) for _ in range(size)]
        self.models = [Model(range(size)) for _ in range(size)]
        self.watches = [Watchdog(notes, rank=rank, world=size) for rank, notes in enumerate(self.notes)]
        for each, model in zip(self.watches, self.models, strict=True):
            each.add(model, lambda alarm: True)
            each.follow("model", model.progress)
        self.forget()

    def forget(self) -> None:
        for notes in self.notes:
            notes.requests = 0

    def look(self, *, without: Sequence[int] = ()) -> None:
        for rank, each in enumerate(self.watches):
            if rank not in without:
                each.look()

    def look_until(self, ready: Callable[[], Any], *, without: Sequence[int] = ()) -> None:
        deadline = time.monotonic() + 30
        while not ready():
            assert time.monotonic() < deadline
            self.look(without=without)
            time.sleep(0.002)


class Clock:
    """A time that advances only during sleeps: the load of the machine affects no wait."""

    def __init__(self) -> None:
        self.now = time.monotonic()

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that count reports, of which a second one is due after a second."""
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock.monotonic)
    monkeypatch.setattr(time, "sleep", clock.sleep)


@pytest.fixture
def texts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The messages of watches; they look a hundred times as often, end no process, and report after 10 ms."""
    found: list[str] = []
    monkeypatch.setattr(watch, "print_immediately", found.append)
    monkeypatch.setattr(watch, "end_process_unless", lambda come_back: None)
    monkeypatch.setattr(stores, "PERIOD", 0.01)
    monkeypatch.setattr(Watchdog, "_start", lambda self: None)
    monkeypatch.setattr(Timekeeper, "start", lambda self, wanted: None)
    flatfsdp.set_collective_timeout(report_after=0.01)
    yield found
    flatfsdp.set_collective_timeout()


@pytest.mark.parametrize("size", [2, 256])
def test_while_all_is_well_a_look_is_one_request(texts: list[str], size: int) -> None:
    world = World(size)
    for _ in range(3):
        world.look()
    assert [notes.requests for notes in world.notes] == [3] * size
    assert texts == []


def reported(size: int, texts: list[str]) -> list[int]:
    """All ranks but the last wait, and all report; the requests of each rank."""
    world = World(size)
    with ExitStack() as waiting:
        for each in world.watches[:-1]:
            waiting.enter_context(each.waiting(range(size), "loads a state dict"))
        time.sleep(0.012)
        world.look_until(lambda: len(texts) >= size)
        requests = [notes.requests for notes in world.notes]
        for _ in range(20):  # not again
            world.look()
            time.sleep(0.001)
    assert len(texts) == size
    world.look()
    return requests


def test_a_wait_is_reported_once_by_every_rank(texts: list[str], clock: None) -> None:
    reported(9, texts)
    reports, after = sorted(texts[:9]), texts[9:]
    for rank, report in enumerate(reports):
        first, waiting, late = report.splitlines()
        assert first.startswith(f"[flatfsdp, rank {rank}] ") and first.endswith(
            "Status of all ranks (requested by rank 0):"
        )
        assert re.fullmatch("    ranks 0, 1, 2, 3, 4, 5, 6, 7: loads a state dict, for .* s", waiting), waiting
        assert late.startswith("    rank 8: in the program's own code since a backward in step 3, for ")
    assert [re.sub(r"\d+ s$", "", each) for each in after] == [
        f"[flatfsdp, rank {rank}] resumed after " for rank in range(8)
    ]


def test_a_report_costs_each_rank_as_little_in_a_large_world(texts: list[str], clock: None) -> None:
    """Except for the rank that collects the answers."""
    few, many = reported(8, texts), reported_anew(256, texts)
    assert max(many[1:]) <= 2 * max(few[1:]) <= 60, (few[1:], many[1:])
    assert many[0] <= 2 * 256 + 256 + 100, many[0]


def reported_anew(size: int, texts: list[str]) -> list[int]:
    texts.clear()
    return reported(size, texts)


def test_a_rank_that_does_not_answer_is_in_the_report(texts: list[str]) -> None:
    world = World(3)
    with world.watches[0].waiting(range(3), "compares its model"):
        time.sleep(0.012)
        world.look_until(lambda: len(texts) == 2, without=[2])
    assert texts[0].splitlines()[-1] == (
        f"    rank 2: no response: {ProcessIdentity.this()} exited, is stopped, or no longer holds a model"
    )
    assert not any(model.error for model in world.models), "it may be stopped"


def test_a_rank_that_ends_with_an_exception_is_reported_to_those_who_need_it(texts: list[str]) -> None:
    world = World(4)
    world.models[3].ranks = [0, 3]
    ExitRecord(1, "ended with ValueError: out of luck").publish(world.notes[1], alarm=True)
    world.look()
    message = "rank 1 ended with ValueError: out of luck. The remaining ranks cannot continue"
    assert [str(model.error) for model in world.models] == [message, "None", message, "None"]
    assert isinstance(world.models[0].error, LostRankError)
    assert texts == [], "nobody waits"


def test_a_rank_that_ended_after_fewer_steps_is_compared_with_models_that_exist(texts: list[str]) -> None:
    world = World(2)
    world.models[0].progress.steps = 8
    deleted = Progress(5, 5)
    world.watches[0].follow("deleted", deleted)
    progress = {"model": (7, 7), "deleted": (3, 3)}
    ExitRecord(1, "exited normally", None, progress).publish(world.notes[1], alarm=True)
    world.look()
    assert "It ran 7 steps of the model, and rank 0 is in step 8: rank 1 skipped a batch" in str(world.models[0].error)
    assert "3 steps" not in str(world.models[0].error)


@pytest.mark.parametrize("before", [False, True])
def test_a_rank_that_destroyed_an_earlier_process_group_is_not_taken_for_lost(before: bool) -> None:
    """Programs may destroy their process group, and create one again in the same launch."""
    text = ExitRecord(1, "destroyed its process group").left_now()
    since = stores.Moment.now()
    found = ExitRecord.left_after(since, text if before else ExitRecord(1, "destroyed its process group").left_now())
    assert (found is None) == before
    assert ExitRecord.left_after(since, None) is ExitRecord.left_after(since, "[1, 2]") is None


def test_a_report_names_ranks_that_did_not_begin_the_last_step(texts: list[str]) -> None:
    flatfsdp.set_collective_timeout(report_after=0.01)
    world = World(2)
    for rank, model in enumerate(world.models):
        model.progress.steps = 8 - rank
    with world.watches[0].waiting([0, 1], "compares its model"):
        world.look_until(lambda: bool(texts))
    assert "    rank 1 did not begin the last step: late, or skipped a batch (as by `continue`" in texts[0]


def test_a_wait_for_ranks_that_live_goes_on(texts: list[str]) -> None:
    world = World(3)
    with world.watches[0].waiting([0, 2], "compares"), world.watches[2].waiting(range(3), "compares"):
        ExitRecord(1, "was killed").publish(world.notes[1], alarm=True)
        world.look()
    assert [each.split("]")[0] for each in texts] == ["[flatfsdp, rank 2"]


def test_an_end_by_an_error_of_all_ranks_is_no_news(texts: list[str]) -> None:
    world = World(2)
    ExitRecord(1, "ended with AgreementError: ranks part", "ranks part").publish(world.notes[1], alarm=True)
    world.look()
    assert str(world.models[0].error) == "ranks part"


def test_a_wait_that_lasts_too_long_is_an_error_on_every_rank(texts: list[str]) -> None:
    flatfsdp.set_collective_timeout(report_after=0.01, raise_after=0.02)
    world = World(3)
    with world.watches[0].waiting(range(3), "compares its model"):
        world.look_until(lambda: all(model.error for model in world.models))
    for model in world.models:
        assert isinstance(model.error, WaitError)
        assert re.search(
            r"rank 0: compares its model, for \d+ s; ranks 1, 2: in the program's own code", str(model.error)
        )
    assert next(each for each in texts if "WaitError" in each).startswith("[flatfsdp, rank 0] WaitError: ranks waited")


def test_ranks_that_wait_for_each_other_in_different_places(texts: list[str]) -> None:
    flatfsdp.set_collective_timeout(report_after=math.inf)
    world = World(3)
    with world.watches[0].waiting([0, 1], "wraps"), world.watches[1].waiting([0, 1, 2], "compares"):
        world.look_until(lambda: len(texts) == 2)
    for rank, each in enumerate(sorted(texts)):
        assert each.startswith(
            f"[flatfsdp, rank {rank}] AgreementError: ranks wait for each other in different places: "
            "rank 0 wraps; rank 1 compares. "
        )


@pytest.mark.parametrize("leaves", [True, False])
def test_a_rank_may_be_slow_to_leave_what_the_others_have_left(leaves: bool, texts: list[str], clock: None) -> None:
    """For however long: it will. Unless the others left it for the first time, and it waits there for the second."""
    flatfsdp.set_collective_timeout(report_after=math.inf)
    world = World(2)
    slow, other = world.watches
    if not leaves:
        with slow.waiting([0, 1], "wraps"):
            pass
    with slow.waiting([0, 1], "wraps"):
        with other.waiting([0, 1], "wraps"):
            pass
        with other.waiting([0, 1], "compares"):
            look_for(world, 2.0)
    assert [type(model.error) for model in world.models] == [type(None) if leaves else AgreementError] * 2


@pytest.mark.parametrize("moves", [True, False])
def test_two_polls_that_find_the_very_same_waits_prove_that_ranks_parted(
    moves: bool, texts: list[str], clock: None
) -> None:
    flatfsdp.set_collective_timeout(report_after=math.inf)
    world = World(2)
    first, second = world.watches
    with second.waiting([0, 1], "compares"):
        for number in range(20 if moves else 0):
            with first.waiting([0, 1], f"wraps {number}"):
                look_for(world, 0.0)  # once, so that no wait is there in two polls, however busy the machine is
            time.sleep(0.02)
        if not moves:
            with first.waiting([0, 1], "wraps"):
                world.look_until(lambda: all(model.error for model in world.models))
    assert [type(model.error) for model in world.models] == [type(None) if moves else AgreementError] * 2


def test_ranks_that_all_wait_in_different_places_prove_a_deadlock(texts: list[str]) -> None:
    world = World(2)
    first, second = world.watches
    with (
        first.waiting([0, 1], "waits for notes", ends_by_notes=True),
        second.waiting([0, 1], "lists", ends_by_notes=True),
    ):
        world.look_until(lambda: all(model.error for model in world.models))
    assert sum("Status of all ranks" in each for each in texts) == 2, "one report of each rank"
    for model in world.models:
        assert type(model.error) is AgreementError
        assert re.fullmatch(
            r"ranks wait for each other, and none can continue: rank 0: waits for notes, for \d+ s; rank 1: lists, for "
            r"\d+ s\. Make collective calls on all ranks, in the same order",
            str(model.error),
        )


def look_for(world: World, seconds: float, *, without: Sequence[int] = (), between: Callable[[], object] = int) -> None:
    deadline = time.monotonic() + seconds
    while True:
        world.look(without=without)
        between()
        if time.monotonic() >= deadline:
            return
        time.sleep(0.002)


@pytest.mark.parametrize("case", ["computes", "does not answer", "moves", "waits in the same place"])
def test_no_deadlock_is_proved_where_a_rank(case: str, texts: list[str]) -> None:
    world = World(3)
    with ExitStack() as stack:

        def waits(rank: int, what: str) -> ExitStack:
            wait = ExitStack()
            wait.enter_context(world.watches[rank].waiting(range(3), what, ends_by_notes=True))
            stack.callback(wait.close)
            return wait

        same = case == "waits in the same place"
        waits(0, "waits")
        waits(1, "waits" if same else "lists")
        last = [waits(2, "waits" if same else "gathers")] if case != "computes" else []

        def move() -> None:
            if case == "moves":
                last.pop().close()
                last.append(waits(2, "gathers"))

        look_for(world, 0.5, without=[2] if case == "does not answer" else [], between=move)
    assert not any(model.error for model in world.models)


def test_a_lost_connection_is_explained_when_the_store_is_gone(
    texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(2)
    world.notes[0].is_gone = True
    error = world.watches[0].explain(RuntimeError("gloo: closed by peer"))
    assert isinstance(error, LostRankError) and str(error).startswith("gone: rank 0, which serves it unless")
    assert "flatfsdp.join(model)" in str(error), "it may have ended for it had no more batches"

    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")  # no rank's end ends it
    assert "join" not in str(world.watches[0].explain(RuntimeError("gloo: closed by peer")))


def test_a_wait_that_outlives_the_store_ends(texts: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(2)
    first = world.watches[0]
    monkeypatch.setattr(watch, "end_process_unless", lambda come_back: first.close())
    with first.waiting(range(2), "compares its model"):
        first._outlive_the_store()
    (sentence,) = texts
    assert sentence.startswith("[flatfsdp, rank 0] LostRankError: the store of the process group")
    assert sentence.endswith(
        "and this rank waits for others: rank 0, which serves it unless a launcher does, has ended. Where ranks have "
        "different numbers of batches, take the steps inside `with flatfsdp.join(model) as joined`"
    )


def test_who_begins_a_poll_may_die_and_another_begins_again(texts: list[str]) -> None:
    world = World(3)
    world.notes[2].count("polls")
    world.notes[2].raise_alarm(json.dumps(["poll", 1, 2, "report"]))
    with world.watches[0].waiting(range(3), "compares"):
        time.sleep(0.012)
        world.look_until(lambda: len(texts) == 2, without=[2])
    assert "requested by rank 0" in texts[0]


def test_who_may_begin_a_poll_may_die_before_it_does(texts: list[str]) -> None:
    world = World(3)
    world.shared["claims/0/0"] = "2"
    with world.watches[0].waiting(range(3), "compares"):
        time.sleep(0.012)
        world.look_until(lambda: len(texts) == 2, without=[2])
    assert "requested by rank 0" in texts[0]


# -- the pure part ---------------------------------------------------------------------------------------------------


def test_ranks_that_do_the_same_share_a_line() -> None:
    answers = {rank: RankStatus("waits", 1.0 + rank) for rank in range(12) if rank != 3} | {
        3: RankStatus("sleeps", 9.0)
    }
    assert lines_of(answers) == ["ranks 0-2, 4-11: waits, for 1 to 12 s", "rank 3: sleeps, for 9 s"]


@pytest.mark.parametrize(
    ("ranks", "words"),
    [([3], "rank 3"), ([0, 2], "ranks 0, 2"), ([0, *range(2, 9), 11, 12], "ranks 0, 2-8, 11-12")],
)
def test_many_ranks_in_words(ranks: list[int], words: str) -> None:
    assert ranks_in_words(ranks) == words


def at(what: str, seconds: float, ranks: tuple[int, ...], *others: tuple[str, tuple[int, ...]]) -> RankStatus:
    """Of a rank that waits there for the first time, and has been in `others` before."""
    return RankStatus(what, seconds, ranks, (), {digest_of_wait(*each): 1 for each in ((what, ranks), *others)})


def test_only_ranks_that_wait_for_each_other_have_parted() -> None:
    first, second, third = at("a", 5.0, (0, 1)), at("b", 5.0, (1, 2)), at("c", 5.0, (0, 1, 2))
    assert parted({0: first, 1: first, 2: third}, patience=2.0) == [], "2 waits for them, they do not for it"
    assert parted({0: first, 1: second}, patience=2.0) == [], "1 does not wait for 0"
    assert parted({0: first, 1: third}, patience=2.0) == [[0], [1]]
    assert parted({0: first, 1: at("c", 1.0, (0, 1, 2))}, patience=2.0) == [], "it has just come"


def test_a_rank_that_has_been_where_another_waits_has_not_parted_from_it() -> None:
    everyone = (0, 1, 2)
    slow, ahead = at("a", 50.0, everyone), at("b", 50.0, everyone, ("a", everyone))
    assert parted({0: slow, 1: ahead, 2: ahead}, patience=2.0) == []
    assert parted({0: ahead, 1: slow, 2: slow}, patience=2.0) == []
    again = slow._replace(entered={digest_of_wait("a", everyone): 2})
    assert parted({0: again, 1: ahead, 2: slow}, patience=2.0) == [[0, 2], [1]], "for the second time"
    assert parted({0: slow, 1: at("b", 50.0, everyone), 2: ahead}, patience=2.0) == [[0], [1, 2]]


def test_a_large_world_looks_less_often(texts: list[str]) -> None:
    assert World(2).watches[0]._polls.period == 0.01
    calls = StatusPoll(Notes({}), rank=0, world=4 * stores.READS)
    assert calls.period == 0.04


@pytest.mark.parametrize(("seconds", "found"), [(0.05, ""), (5.0, "rank 0 a; rank 1 c")])
def test_ranks_that_answer_at_different_moments_may_have_gone_on_between(
    texts: list[str], seconds: float, found: str
) -> None:
    """Only waits that are older than the poll were there at one moment."""
    shared: dict[str, str] = {}
    first, second = (StatusPoll(Notes(shared), rank=rank, world=2) for rank in range(2))
    first.answer(1, 0, "report", at("a", seconds, (0, 1)))
    time.sleep(0.1)
    second.answer(1, 0, "report", at("c", seconds, (0, 1)))
    assert dict(first.results())[1].parted == found


# -- settings --------------------------------------------------------------------------------------------------------


def test_limits_are_set_and_set_back() -> None:
    flatfsdp.set_collective_timeout(report_after=5, raise_after=50)
    assert waits.limits == waits.WaitLimits(5.0, 50.0)
    flatfsdp.set_collective_timeout()
    assert waits.limits == waits.WaitLimits(30.0, None)


@pytest.mark.parametrize(
    ("kwargs", "kind", "message"),
    [
        ({"report_after": "5"}, ConfigTypeError, "report_after: got '5' (str). Accepted: a number of seconds."),
        ({"report_after": None}, ConfigTypeError, "report_after: got None (NoneType). Accepted: a number of seconds."),
        ({"raise_after": True}, ConfigTypeError, "raise_after: got True (bool). Accepted: a number of seconds."),
        ({"report_after": 0}, ConfigValueError, "report_after: got 0. Accepted: a number of seconds greater than 0."),
        (
            {"raise_after": math.nan},
            ConfigValueError,
            "raise_after: got nan. Accepted: a number of seconds greater than",
        ),
        ({"raise_after": 29}, ConfigValueError, "raise_after: got 29 with report_after=30.0. Accepted: a number of"),
    ],
)
def test_limits_that_are_none_are_refused(kwargs: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind) as caught:
        flatfsdp.set_collective_timeout(**kwargs)
    assert str(caught.value).startswith(message)
    assert waits.limits == waits.WaitLimits()


def test_what_blocks_a_thread_is_entered_for_as_long_as_it_lasts() -> None:
    assert math.isinf(waits.blocked_since())
    with waits.blocked():
        assert time.monotonic() - waits.blocked_since() < 10
    assert math.isinf(waits.blocked_since())
    assert ANSWER > 2, "a watch looks once per period"


def test_a_process_ends_without_collectives_that_ranks_may_never_issue() -> None:
    """A rank that was done with its last step waited ten seconds for one that had failed in it."""
    watched = Watchdog(Notes({}), rank=0, world=2)
    pending, looks = SimpleNamespace(is_completed=lambda: False), iter([False, False, True])
    watched.outlast([pending], lambda: next(looks, True))
    began = time.monotonic()
    watched.finish_works()
    assert next(looks, None) is None
    assert time.monotonic() - began < watch.OUTLAST
