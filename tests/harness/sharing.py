"""Several pytest processes that do one run together: ``pytest --processes 3``.

The process that was started starts the others and shows the results of all, as if it had run everything itself. Each
takes files, one by one, that no other has taken: many tests wait, and meanwhile leave the cores to tests of another
process. Processes that collect the same tests in the same order need only a common folder to agree: the first one to
create a file's mark there runs that file. Those that take longest begin first, and files whose tests wait come
between files whose tests compute.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from itertools import groupby
from pathlib import Path
from typing import IO

import pytest

WAIT = 0.2  # seconds between polls of the other processes, when this one has nothing left to do
SPREAD = "process", "distributed"  # tiers
LONGEST = "test_train.py", "test_notes.py"  # what begins last should be short
QUIET = ("-p", "no:cacheprovider", "--processes", "1")


def in_turn(items: Sequence[pytest.Item]) -> list[list[pytest.Item]]:
    """The tests of each file, in the order in which files begin: the longest, then those of the tier `process` spread
    evenly over those of `distributed`, then the others."""
    files = [list(of_file) for _, of_file in groupby(items, key=lambda item: item.path)]
    tiers = [next((each for each in SPREAD if of_file[0].get_closest_marker(each)), "") for of_file in files]
    place: dict[int, float] = {}
    for number, (of_file, tier) in enumerate(zip(files, tiers, strict=True)):
        among = [each for each, other in enumerate(tiers) if other == tier]
        place[number] = among.index(number) / len(among) if tier else 1
        if of_file[0].path.name in LONGEST:
            place[number] = -1
    return [files[number] for number in sorted(place, key=lambda number: place[number])]


class Share:
    """The plugin of each of several processes: it runs the files that it is the first to take."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.testsfailed or session.config.option.collectonly:
            return None
        mine = self._taken(session.items)
        item = next(mine, None)
        while item is not None:
            following = next(mine, None)  # keeps the fixtures that both need
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            self.look(session)
            if session.shouldfail:
                raise session.Failed(session.shouldfail)
            if session.shouldstop:
                raise session.Interrupted(session.shouldstop)
            item = following
        self.finish(session)
        return True

    def _taken(self, items: list[pytest.Item]) -> Iterator[pytest.Item]:
        for number, of_file in enumerate(in_turn(items)):
            with suppress(FileExistsError):
                (self.folder / f"{number}.taken").touch(exist_ok=False)
                yield from of_file

    def look(self, session: pytest.Session) -> None:
        """Called after each test."""

    def finish(self, session: pytest.Session) -> None:
        """Called when no file is left."""


class Helper(Share):
    """The plugin of a process started by a `Leader`, for which it records every report."""

    def __init__(self, config: pytest.Config, folder: Path, number: int) -> None:
        super().__init__(folder)
        self._config, self._leader = config, os.getppid()
        self._reports = _reports(folder, number).open("a")

    def look(self, session: pytest.Session) -> None:
        if os.getppid() != self._leader:
            session.shouldstop = "the process that shows the results is gone"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._reports.write(written_report(self._config, report))
        self._reports.flush()


def written_report(config: pytest.Config, report: pytest.TestReport) -> str:
    """`report` as a line."""
    return json.dumps(config.hook.pytest_report_to_serializable(config=config, report=report)) + "\n"


def read_report(config: pytest.Config, line: str) -> pytest.TestReport:
    """The report that `written_report` has written as this line."""
    report: pytest.TestReport = config.hook.pytest_report_from_serializable(config=config, data=json.loads(line))
    if isinstance(report.longrepr, list):  # a skip's: JSON has no tuples, but --junitxml wants one
        report.longrepr = tuple(report.longrepr)
    return report


class Leader(Share):
    """Starts the other processes, shows their reports, and fails if one of them does not succeed."""

    def __init__(self, config: pytest.Config, count: int) -> None:
        self._exit = ExitStack()
        super().__init__(Path(self._exit.enter_context(tempfile.TemporaryDirectory(prefix="flatfsdp-tests-"))))
        self._helpers = [_Started(self.folder, number, config) for number in range(1, count)]
        for helper in self._helpers:
            self._exit.callback(helper.end)

    def look(self, session: pytest.Session) -> None:
        for helper in self._helpers:
            for report in helper.news():
                session.config.hook.pytest_runtest_logreport(report=report)
                if report.when == "teardown":
                    session.config.hook.pytest_runtest_logfinish(nodeid=report.nodeid, location=report.location)

    def finish(self, session: pytest.Session) -> None:
        for helper in self._helpers:
            while helper.runs():
                self.look(session)
        self.look(session)
        for helper in self._helpers:
            if helper.process.returncode not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, NOTHING_LEFT):
                session.shouldfail = f"a process that shares the run ended otherwise than with its tests: {helper}"
                raise session.Failed(session.shouldfail)

    def pytest_unconfigure(self) -> None:
        self._exit.close()


NOTHING_LEFT = pytest.ExitCode.NO_TESTS_COLLECTED  # all files were taken


class _Started:
    """A helper, from the view of its leader."""

    def __init__(self, folder: Path, number: int, config: pytest.Config) -> None:
        self._config = config
        self.output, reports = folder / f"{number}.output", _reports(folder, number)
        reports.touch()
        self._reports: IO[str] = reports.open()
        self._line = ""
        command = [sys.executable, "-m", "pytest", *config.invocation_params.args, *QUIET]
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                [*command, "--helps", f"{folder}:{number}"],
                cwd=config.invocation_params.dir,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def news(self) -> Iterator[pytest.TestReport]:
        while line := self._reports.readline():
            self._line += line
            if self._line.endswith("\n"):  # otherwise it is still being written
                data, self._line = self._line, ""
                yield read_report(self._config, data)

    def runs(self) -> bool:
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(WAIT)
        return self.process.returncode is None

    def end(self) -> None:
        self.process.kill()
        self.process.wait(60)
        self._reports.close()

    def __str__(self) -> str:
        return f"exit code {self.process.returncode}\n{self.output.read_text(errors='replace')[-8000:]}"


def _reports(folder: Path, number: int) -> Path:
    return folder / f"{number}.reports"


def options(parser: pytest.Parser) -> None:
    """The options of users, and those that a leader passes to its helpers."""
    parser.addoption("--processes", type=int, default=1, help="run the files of tests in as many processes at once")
    parser.addoption("--helps", help="FOLDER:NUMBER of a process that was started by --processes")


def register(config: pytest.Config) -> None:
    """Share the run if the command line requests it."""
    if helps := config.getoption("--helps"):
        folder, _, number = helps.rpartition(":")
        config.pluginmanager.register(Helper(config, Path(folder), int(number)))
    elif (count := config.getoption("--processes")) > 1:
        config.pluginmanager.register(Leader(config, count))
