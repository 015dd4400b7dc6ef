"""Text of other processes in the store: plain values on one line, or nothing; no such text ends the watch."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from datetime import timedelta

import pytest
import torch.distributed as dist

from flatfsdp.engine.base.foreign_text import LONGEST, one_line, parse
from flatfsdp.engine.base.processes import ProcessIdentity
from flatfsdp.engine.watchdog import watchdog as watch
from flatfsdp.engine.watchdog.local_waits import Timekeeper
from flatfsdp.engine.watchdog.status_report import ExitRecord, Progress, RankStatus, StatusReport
from flatfsdp.engine.watchdog.store import StoreClient
from flatfsdp.engine.watchdog.watchdog import Watchdog
from flatfsdp.errors import AgreementError
from tests.harness.thorough import seeds

pytestmark = pytest.mark.unit

FORGED = "was promoted\n[flatfsdp, rank 0] all is well \x1b[2J\x1b[31mFORGED \u202edesrever\u2028"


def test_text_takes_one_line_without_control_characters() -> None:
    line = one_line(FORGED)
    assert line == "was promoted [flatfsdp, rank 0] all is well \\x1b[2J\\x1b[31mFORGED \\u202edesrever"
    assert one_line("as it is, für alle") == "as it is, für alle"
    assert len(one_line("x" * 10 * LONGEST)) < LONGEST + 10


def test_json_of_a_known_shape_or_nothing() -> None:
    assert parse('["a\\nb", 1, {"k": null}]') == ["a b", 1, {"k": None}]
    for garbage in ("", "no json", "NaN", "[1e999]", "[-Infinity]", "[" * 100_000, "[[[[[[[[[[1]]]]]]]]]]", None):
        assert parse(garbage) is None, garbage
    assert (
        RankStatus.of('["waits", "long", []]') is RankStatus.of('["waits", 1.0, ["1"]]') is RankStatus.of("7") is None
    )
    assert RankStatus.of('["waits", 1.0, [0, 1], [5.5], {"p": "1"}, {}]') is None
    found = RankStatus.of('["waits", 1.0, [0, 1], [5.5], {"p": 1}, {"m": [8, 7], "n": [1], "o": 1}]')
    assert found == RankStatus("waits", 1.0, (0, 1), (5.5,), {"p": 1}, {"m": (8, 7)})
    assert ProcessIdentity.of(["host", "", "../..", ""]) is None
    assert ExitRecord.of([0, 1, None]) is None
    assert StatusReport.of('["joke", 1, [], [], {}, "", "", 0, ""]') is StatusReport.of("[]") is None


def test_what_is_reported_comes_back() -> None:
    lost, gone = [ExitRecord(1, "killed", None, {"m": (8, 7)})], {2: ProcessIdentity("h", "n", 7, "5")}
    text = StatusReport("lost", 1, ["rank 0: computes"], lost, gone, "parted", "in these", 3, "")
    assert StatusReport.of(json.dumps(text)) == text


@pytest.mark.parametrize("make", [dist.HashStore, lambda: dist.TCPStore("localhost", 0, is_master=True)])
def test_a_counter_that_others_wrote_over_counts_on(make: type[dist.Store]) -> None:
    store = make()
    notes = notes_in(store)
    assert notes.count("alarms", 0) == 0
    assert [notes.count("alarms"), notes.count("alarms"), notes.count("alarms", 0)] == [1, 2, 2]
    for garbage in ("garbage", "", "9" * 40, "1_0", "\0"):
        notes.post("alarms", garbage)
        assert notes.count("alarms", 0) >= 0
        assert notes.count("alarms") >= 1
        assert notes.count("alarms", 0) >= 1


def notes_in(store: dist.Store) -> StoreClient:
    store.set_timeout(timedelta(seconds=5))
    return StoreClient(store)


class Model:
    """A model that never runs."""

    busy, doing, last_step = False, ("in the program's own code", 0.0), ""
    progress = Progress()
    time_limit = math.inf

    def consider(self, alarm: str) -> bool:
        return True

    def fail(self, error: AgreementError, ranks: Sequence[int] | None) -> bool:
        return True


KEYS = "alarms alarm/1 alarm/2 alarm/3 ended ended/1 polls poll/1/result poll/1/here here/1".split()
TEXTS = ("", "garbage", "[]", "{}", "7", "-7", "9" * 18, "[" * 5000, '"text"', "[1e999]", "\0", '["poll"]')


def garbage(drawn: random.Random) -> str:
    values = ["poll", "ended", "failed", "lost", "meet", "\x1b[2J", 0, 1, -1, 10**30, 1.5, None, [], [0], {"a": [1]}]
    if drawn.random() < 0.3:
        return drawn.choice(TEXTS)
    return json.dumps([drawn.choice(values) for _ in range(drawn.randint(1, 5))])


@pytest.mark.parametrize("seed", seeds(20, 2000))
def test_garbage_in_the_store_never_ends_the_watch(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    texts: list[str] = []
    monkeypatch.setattr(watch, "print_immediately", texts.append)
    monkeypatch.setattr("flatfsdp.engine.watchdog.store.PERIOD", 0.001)
    monkeypatch.setattr(Timekeeper, "start", lambda self, wanted: None)
    monkeypatch.setattr(Watchdog, "_start", lambda self: None)
    drawn, notes, model = random.Random(seed), notes_in(dist.HashStore()), Model()
    looking = Watchdog(notes, rank=0, world=2)
    for _ in range(30):
        notes.post(drawn.choice(KEYS), garbage(drawn))
        looking.look()
    # It still receives true reports.
    monkeypatch.setattr("flatfsdp.engine.watchdog.watchdog.end_process_unless", lambda come_back: None)
    looking.add(model, lambda alarm: True)
    before = looking._lost
    ExitRecord(1, "ended with FileNotFoundError: no such file").publish(notes, alarm=True)
    for _ in range(2000):
        looking.look()
        if looking._lost is not before:
            break
    assert "no such file" in str(looking._lost)
    assert not any(ord(each) < 32 for line in texts for each in line if each != "\n")
