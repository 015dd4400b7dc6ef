"""`tools/random_runs`: failing, dying and hanging seeds are named, and an interrupted run continues."""

from __future__ import annotations

import json
import multiprocessing.forkserver
import os
import time
from collections import Counter
from multiprocessing import popen_fork
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

import pytest

from tests.harness import processes
from tools import run_random
from tools.run_random import BLOCK, FILES, Seed

pytestmark = pytest.mark.process

FILE = "tests/tools/random_tests.py"
RANKS, PROCESS = f"{FILE}::test_ranks", f"{FILE}::test_process"


@pytest.fixture(autouse=True)
def _of_this_folder() -> Any:
    with patch.dict(FILES, models=(FILE,), programs=()):
        yield


class _Forked(processes._Rank):
    """A player that the server forked, as it forks that player's ranks: neither imports torch anew."""

    def _bootstrap(self, *args: Any) -> NoReturn:
        multiprocessing.forkserver._forkserver.ensure_running = lambda: None  # type: ignore[attr-defined]
        super()._bootstrap(*args)


class _Parent(processes._Rank):
    """A player that the server forked, and that forks its ranks itself: as the server that a player starts, they are in
    its process group."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.environment = dict(os.environ)

    def _bootstrap(self, *args: Any) -> NoReturn:
        os.environ.update(self.environment)
        processes._Rank._Popen = staticmethod(popen_fork.Popen)  # type: ignore[assignment]
        super()._bootstrap(*args)


class _Forking(ForkServerContext):
    def __init__(self, player: type[processes._Rank]) -> None:
        super().__init__()
        self.Process = player  # type: ignore[misc, assignment]


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """For seeds that do not hang."""
    monkeypatch.setattr(run_random.multiprocessing, "get_context", lambda _: _Forking(_Forked))


@pytest.mark.usefixtures("forked")
def test_failing_and_dying_seeds_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results, report = tmp_path / "results.jsonl", tmp_path / "report.md"
    command = ["--models", "8", "--programs", "0", "--first", "0", "--results", str(results), "--report", str(report)]
    assert run_random.main([*command, "--processes", "3"]) == 1
    printed = capsys.readouterr().out
    rows = {(row["test"], row["seed"]): row for row in map(json.loads, results.read_text().splitlines())}
    assert {key: row["outcome"] for key, row in rows.items()} == {
        (RANKS, 0): "right",
        (RANKS, 1): "failed",
        (RANKS, 2): "right",
        (RANKS, 3): "refused",
        (PROCESS, BLOCK): "right",
        (PROCESS, BLOCK + 1): "right",
        (PROCESS, BLOCK + 2): "failed",
        (PROCESS, BLOCK + 3): "right",
    }
    for key, words in {
        (RANKS, 1): "answers of the ranks: [['differs'], ['differs']]",
        (PROCESS, BLOCK + 2): "ended the process that played it (exit code 3)",
    }.items():
        assert words in rows[key]["words"]
        assert f"{words}\n  tools/random_runs '{Seed(*key)}'\n" in printed
    assert rows[RANKS, 1]["again"] == "failed"
    assert {row["commit"] for row in rows.values()} == {run_random.commit()}
    assert "8 of 8 seeds played, 5 right, 1 ended in an error that the manual has, 2 failed." in report.read_text()
    assert f"Failed: `{Seed(RANKS, 1)}`" in report.read_text()


def test_a_seed_that_hangs_is_killed_with_its_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLATFSDP_RANDOM_TESTS", str(tmp_path))
    monkeypatch.setattr(run_random.multiprocessing, "get_context", lambda _: _Forking(_Parent))
    player = run_random._Player()
    try:
        assert player.play(Seed(RANKS, 0), 200.0).outcome == "right"  # its pool runs now
        result = player.play(Seed(PROCESS, 8), 4.0)
        assert (result.outcome, result.words) == ("failed", "did not end within 4 s")
        pids = [int(each.read_text()) for each in tmp_path.iterdir()]
        deadline = time.monotonic() + 60
        while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
        assert player.play(Seed(PROCESS, 0), 200.0).outcome == "right"
    finally:
        player.end()


@pytest.mark.usefixtures("forked")
def test_an_interrupted_run_continues(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = tmp_path / "results.jsonl"
    command = ["--models", "8", "--programs", "0", "--first", "4", "--processes", "1", "--results", str(results)]

    keep = run_random._Run._keep

    def keep_and_wait(run: run_random._Run, result: run_random.Result) -> None:
        keep(run, result)
        if len(run.results) == 3:
            run.is_over.wait(30)

    def follow(run: run_random._Run, *others: object) -> None:
        while len(run.results) < 3:
            time.sleep(0.01)
        raise KeyboardInterrupt

    with (
        patch.object(run_random, "_follow", follow),
        patch.object(run_random._Run, "_keep", keep_and_wait),
        patch.object(run_random, "commit", lambda: "before"),
    ):
        assert run_random.main(command) == 1
    assert "interrupted: 5 seeds are left; the same command continues" in capsys.readouterr().out
    first = results.read_text()
    results.write_text(first + '{"test": "cut o')  # as its writer's end may leave it
    with patch.object(run_random, "commit", lambda: "after"):
        assert run_random.main(command) == 0
    assert results.read_text().startswith(first)
    rows = [*map(json.loads, results.read_text().splitlines())]
    assert len({(row["test"], row["seed"]) for row in rows}) == len(rows) == 8
    assert Counter(row["commit"] for row in rows) == {"before": 3, "after": 5}
    assert "before (3 seeds), after (5 seeds)" in capsys.readouterr().out
    assert run_random.main(command) == 0
    assert "8 seeds, 0 of them to play" in capsys.readouterr().out


def test_a_named_seed_is_played_with_its_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_random.main([str(Seed(RANKS, 1))]) == 1
    printed = capsys.readouterr().out
    assert f"failed: {RANKS}[1] on 2 ranks" in printed
    assert "answers of the ranks: [['differs'], ['differs']]" in printed
