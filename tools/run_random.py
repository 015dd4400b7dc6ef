"""Runs random models and random training programs of the test suite on 2 to 4 ranks, as many as requested, and prints
the seeds that fail, each with the command that runs it again.

Each finished seed is a line in the results file. A later call with the same file runs what is left: the seeds that no
call has finished, and those that failed. Each line has the commit at which the seed was run.

What a seed draws, and what is expected of it, is in the tests: this command calls each test of a seed that
`tests.harness.thorough.seeds` draws. A new test in these files is run without a change here.

Several processes each run one seed at a time, in pools of ranks that stay. A seed that does not end within the limit
has failed: its process is killed with its ranks, and the next seed gets a new one.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib
import inspect
import json
import multiprocessing
import os
import platform
import queue
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "build" / "random_runs.jsonl"
FILES = {
    "models": (
        "tests/runtime/test_random_models.py",
        "tests/runtime/test_random_arguments.py",
        "tests/fully_shard/test_random_models.py",
    ),
    "programs": ("tests/runtime/test_random_programs.py",),
    "sums": ("tests/features/test_deterministic_random.py",),
    "alarms": ("tests/features/test_audit.py",),
    "kills": ("tests/elastic/test_random_kills.py",),
    "joins": ("tests/elastic/test_random_joins.py",),
    "pauses": ("tests/elastic/test_random_pauses.py",),
}
BLOCK = 10_000  # seeds of a test, before those of the next one: each draws models that no other has
WORDS = 6000  # of a report of a failure that are kept
EVERY = 30.0  # seconds between lines on progress
_SEED = re.compile(r"(?P<test>.+::test_\w+)\[(?P<seed>\d+)\]")

Test = Callable[[Callable[..., list[Any]], int], None]


@dataclass(frozen=True)
class Seed:
    """One seed of one test, named like pytest names it."""

    test: str
    seed: int

    def __str__(self) -> str:
        return f"{self.test}[{self.seed}]"

    @classmethod
    def named(cls, text: str) -> Seed:
        found = _SEED.fullmatch(text)
        if found is None:
            raise argparse.ArgumentTypeError(f"expected FILE::TEST[SEED], found {text!r}")
        return cls(found["test"], int(found["seed"]))


@dataclass(frozen=True)
class Result:
    """The end of one seed: "right", "refused" (in an error that the test expects of it), "skipped" or "failed"."""

    test: str
    seed: int
    outcome: str
    world: int
    seconds: float
    words: str = ""  # about a failure
    again: str = ""  # the outcome of a seed that has failed once, in ranks that have just started
    commit: str = ""
    ended: str = ""
    recoveries: Sequence[float] = ()  # seconds of each, from lost ranks

    @property
    def key(self) -> Seed:
        return Seed(self.test, self.seed)

    @property
    def is_good(self) -> bool:
        return self.outcome != "failed"


def names_of(kind: str) -> list[str]:
    """Names of all tests of that kind that play any seed."""
    return [f"{file}::{name}" for file in FILES[kind] for name in random_tests_in(file)]


def random_tests_in(file: str) -> dict[str, Test]:
    module = importlib.import_module(file.removesuffix(".py").replace("/", "."))
    found = {}
    for name, value in vars(module).items():
        if name.startswith("test_") and getattr(value, "__module__", "") == module.__name__:
            marks = inspect.getsource(value).partition(f"def {name}(")[0]
            if re.search(r"\bseeds\(", marks):
                found[name] = value
    return found


def drawn(tests: list[str], number: int, first: int) -> list[Seed]:
    """`number` seeds, from all tests in turn."""
    if number > BLOCK * len(tests):
        raise SystemExit(f"{len(tests)} tests have {BLOCK * len(tests):,} seeds, but {number:,} were requested")
    return [
        Seed(tests[index % len(tests)], first + BLOCK * (index % len(tests)) + index // len(tests))
        for index in range(number)
    ]


def in_turn(*lists: list[Seed]) -> list[Seed]:
    """All of them, each list spread evenly over the whole."""
    placed = [((place + 0.5) / len(each), seed) for each in lists for place, seed in enumerate(each)]
    return [seed for _, seed in sorted(placed, key=lambda each: each[0])]


def play(seed: Seed) -> Result:
    """Play it in this process's pools, and once more in new ones if it fails."""
    from tests.harness import pool

    result = _play_once(seed)
    if result.is_good:
        return result
    pool.discard_all()
    return replace(result, again=_play_once(seed).outcome)


def _play_once(seed: Seed) -> Result:
    from tests.harness import pool, thorough

    thorough.found = found = thorough.Found()
    file, name = seed.test.split("::")
    worlds: list[int] = []
    answers: list[list[Any]] = []
    refused = False

    def run(world: int, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[Any]:
        nonlocal refused
        worlds.append(world)
        try:
            answers.append(pool.run(world, fn, *args, **kwargs))
        except pool.JobFailed:
            refused = True  # a test that lets it pass has looked at it
            raise
        return answers[-1]

    began = time.monotonic()
    outcome, words = "right", ""
    try:
        random_tests_in(file)[name](run, seed.seed)
        outcome = "refused" if refused or found.refused else "right"
    except pytest.skip.Exception:
        outcome = "skipped"
    except Exception:
        outcome, words = "failed", traceback.format_exc()
        if answers:
            words += f"answers of the ranks: {answers[-1]}"
    world = max(worlds, default=found.world)
    seconds = time.monotonic() - began
    return Result(seed.test, seed.seed, outcome, world, seconds, _shortened(words), recoveries=found.recoveries)


def _shortened(words: str) -> str:
    return words if len(words) <= WORDS else f"{words[: WORDS // 3]}\n[...]\n{words[-2 * WORDS // 3 :]}"


def _serve(pipe: Connection) -> None:
    """The main function of a process that plays seeds until its parent has ended."""
    os.setsid()  # it can be killed with all the ranks that it has started
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    while True:
        try:
            seed = pipe.recv()
            pipe.send(play(seed))
        except (EOFError, BrokenPipeError):
            return


class _Player:
    """A process that plays one seed at a time, and is started anew when one hung or ended it."""

    def __init__(self) -> None:
        self._process: multiprocessing.process.BaseProcess | None = None

    def play(self, seed: Seed, limit: float) -> Result:
        if self._process is None:
            context = multiprocessing.get_context("spawn")
            self._pipe, theirs = context.Pipe()
            self._process = context.Process(target=_serve, args=(theirs,), name=f"player of {seed}")
            self._process.start()
            theirs.close()  # so that a process that has died shows as the end of its pipe
        began = time.monotonic()
        try:
            self._pipe.send(seed)
            if self._pipe.poll(limit):
                result: Result = self._pipe.recv()
                return result
            words = f"did not end within {limit:g} s"
        except (EOFError, OSError):
            self._process.join(5)
            words = f"ended the process that played it (exit code {self._process.exitcode})"
        self.end()
        return Result(seed.test, seed.seed, "failed", 0, time.monotonic() - began, words)

    def kill(self) -> None:
        """Kill the process and its ranks, if there is one. On any thread."""
        process = self._process
        if process is not None and process.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its ranks too, also those that it left when it died

    def end(self) -> None:
        """Kill them, and wait until the process has ended. On the thread that plays."""
        if self._process is not None:
            self.kill()
            self._process.kill()  # it may not have a process group yet
            self._process.join(30)
            self._pipe.close()
            self._process = None


@dataclass
class _Run:
    """Seeds that are played, and what came of them."""

    left: queue.SimpleQueue[Seed]
    file: Path
    commit: str
    limit: float
    results: dict[Seed, Result] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    is_over: threading.Event = field(default_factory=threading.Event)

    def work(self, player: _Player) -> None:
        while not self.is_over.is_set():
            try:
                seed = self.left.get_nowait()
            except queue.Empty:
                break
            result = player.play(seed, self.limit)
            if self.is_over.is_set():
                break  # it was interrupted, and is played next time
            now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
            self._keep(replace(result, commit=self.commit, ended=now))
        player.end()

    def _keep(self, result: Result) -> None:
        with self.lock:
            self.results[result.key] = result
            with self.file.open("a") as lines:
                lines.write(json.dumps(asdict(result)) + "\n")
            if not result.is_good:
                _say(f"failed: {result.key}" + (" (right in new ranks)" if result.again == "right" else ""))


def kept(file: Path) -> dict[Seed, Result]:
    """The last result of each seed in a file. A line that was cut off by the end of its writer is no result."""
    found: dict[Seed, Result] = {}
    if file.exists():
        text = file.read_text()
        if not text.endswith("\n"):
            text = text[: text.rfind("\n") + 1]
            file.write_text(text)
        for line in text.splitlines():
            result = Result(**json.loads(line))
            found[result.key] = result
    return found


def commit() -> str:
    """The commit of this folder, with "+" if files differ from it."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no")
    return (git("rev-parse", "--short", "HEAD") or "unknown") + "+" * bool(changed)


def report(results: dict[Seed, Result], asked: list[Seed], command: str) -> str:
    """What came of the seeds that were asked for, as Markdown."""
    rows = [results[seed] for seed in asked if seed in results]
    outcomes = Counter(row.outcome for row in rows)
    minutes = sum(row.seconds for row in rows) / 60
    commits = ", ".join(f"{name} ({number:,} seeds)" for name, number in Counter(row.commit for row in rows).items())
    dates = sorted(row.ended[:10] for row in rows)
    lines = [
        "# Random models and programs",
        "",
        f"`{command}`: {len(rows):,} of {len(asked):,} seeds played, "
        f"{outcomes['right']:,} right, {outcomes['refused']:,} ended in an error that the manual has, "
        f"{outcomes['failed']:,} failed. The sum of their times is {minutes:,.1f} minutes.",
        "",
        f"Commit: {commits or '-'}. {' to '.join(sorted({dates[0], dates[-1]})) if dates else ''} "
        f"torch {torch.__version__}, Python {platform.python_version()}, gloo ranks on {os.cpu_count()} processors.",
        "",
        "| test | seeds | 2 ranks | 3 ranks | 4 ranks | right | refused | skipped | failed | minutes |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for test in sorted({seed.test for seed in asked}):
        own = [row for row in rows if row.test == test]
        counts = [sum(row.world == world for row in own) for world in (2, 3, 4)]
        counts += [sum(row.outcome == name for row in own) for name in ("right", "refused", "skipped", "failed")]
        name = test.removeprefix("tests/")
        numbers = " | ".join(f"{number:,}" for number in (len(own), *counts))
        lines.append(f"| {name} | {numbers} | {sum(row.seconds for row in own) / 60:.1f} |")
    for test in sorted({row.test for row in rows if row.recoveries}):
        times = sorted(each for row in rows if row.test == test for each in row.recoveries)
        middle, most = times[len(times) // 2], times[len(times) * 9 // 10]
        lines.append(
            f"\nRecoveries in {test.removeprefix('tests/')}: {len(times):,}; half of them took less than "
            f"{middle:.2f} s, nine of ten less than {most:.2f} s, the longest {times[-1]:.2f} s."
        )
    lines += [f"\nFailed: `{row.key}`" for row in rows if not row.is_good]
    return "\n".join(lines) + "\n"


def _say(words: str) -> None:
    sys.stdout.write(f"{words}\n")
    sys.stdout.flush()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="tools/random_runs", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "seeds", nargs="*", type=Seed.named, metavar="FILE::TEST[SEED]", help="run only these, and show their errors"
    )
    parser.add_argument("--models", type=int, default=5000, metavar="N", help="number of models (default: 5000)")
    parser.add_argument("--programs", type=int, default=2000, metavar="N", help="number of programs (default: 2000)")
    parser.add_argument(
        "--sums", type=int, default=0, metavar="N", help="number of programs with deterministic sums (default: 0)"
    )
    parser.add_argument(
        "--alarms", type=int, default=0, metavar="N", help="number of times 25 steps with an audit (default: 0)"
    )
    parser.add_argument("--kills", type=int, default=0, metavar="N", help="number of jobs that lose ranks (default: 0)")
    parser.add_argument("--joins", type=int, default=0, metavar="N", help="number of jobs that grow (default: 0)")
    parser.add_argument(
        "--pauses",
        type=int,
        default=0,
        metavar="N",
        help="number of jobs in which a rank pauses, or saves, for 20 s, or is fenced (default: 0)",
    )
    parser.add_argument("--first", type=int, default=100_000, metavar="SEED", help="the first seed (default: 100000)")
    parser.add_argument(
        "--processes", type=int, default=2, metavar="P", help="number of seeds to run at the same time (default: 2)"
    )
    parser.add_argument(
        "--limit", type=float, default=300, metavar="S", help="time limit of a seed, in seconds (default: 300)"
    )
    parser.add_argument(
        "--results",
        type=Path,
        default=RESULTS,
        metavar="FILE",
        help="the results file (default: build/random_runs.jsonl)",
    )
    parser.add_argument("--report", type=Path, metavar="FILE", help="also write the report to this file")
    given = parser.parse_args(arguments)
    if given.seeds:
        results = [play(seed) for seed in given.seeds]
        for each in results:
            _say(f"{each.outcome}: {each.key} on {each.world} ranks, {each.seconds:.1f} s\n{each.words}".rstrip())
        return int(not all(each.is_good for each in results))
    numbers = {kind: getattr(given, kind) for kind in FILES}
    asked = in_turn(*(drawn(names_of(kind), number, given.first) for kind, number in numbers.items()))
    given.results.parent.mkdir(parents=True, exist_ok=True)
    before = kept(given.results)
    run = _Run(queue.SimpleQueue(), given.results, commit(), given.limit, before)
    left = [seed for seed in asked if seed not in before or not before[seed].is_good]
    for seed in left:
        run.left.put(seed)
    _say(f"{len(asked):,} seeds, {len(left):,} of them to play, at commit {run.commit}; results in {given.results}")
    was_interrupted = _play_all(run, min(given.processes, len(left)))
    optional = ("sums", "alarms", "kills", "joins", "pauses")
    chosen = " ".join(f"--{kind} {number}" for kind, number in numbers.items() if number or kind not in optional)
    command = f"tools/random_runs {chosen} --first {given.first}"
    text = report(run.results, asked, command)
    _say(text)
    if given.report is not None:
        given.report.write_text(text)
    failed = [run.results[seed] for seed in asked if seed in run.results and not run.results[seed].is_good]
    for result in failed:
        _say(f"{result.words.strip()}\n  tools/random_runs '{result.key}'\n")
    missing = sum(seed not in run.results for seed in asked)
    if missing:
        _say(f"{'interrupted: ' * was_interrupted}{missing:,} seeds are left; the same command continues")
    return int(bool(missing or failed))


def _play_all(run: _Run, processes: int) -> bool:
    """Play what is left. Returned: whether it was interrupted, by SIGINT or SIGTERM."""
    left = run.left.qsize()
    players = [_Player() for _ in range(processes)]
    threads = [threading.Thread(target=run.work, args=(player,)) for player in players]
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for thread in threads:
            thread.start()
        _follow(run, threads, left)
        return False
    except KeyboardInterrupt:
        return True
    finally:
        signal.signal(signal.SIGTERM, before)
        run.is_over.set()
        for player in players:
            player.kill()
        for thread in threads:
            thread.join(60)


def _follow(run: _Run, threads: list[threading.Thread], left: int) -> None:
    """Wait until all is played, and say how far it is."""
    began = said = time.monotonic()
    while any(thread.is_alive() for thread in threads):
        for thread in threads:
            thread.join(0.2)
        now = time.monotonic()
        if now - said > EVERY:
            said = now
            done = left - run.left.qsize() - len(threads)
            rate = done / (now - began)
            rest = f", about {(left - done) / rate / 60:.0f} minutes left" if done > 0 else ""
            _say(f"{done:,} of {left:,} played, {rate:.1f} in a second{rest}")


if __name__ == "__main__":
    sys.exit(main())
