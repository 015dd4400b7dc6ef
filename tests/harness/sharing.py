"""Several pytest processes that do one run together: ``pytest --processes 3``.

The process that was started collects the tests, forks the others, and shows the results of all, as if it had run
everything itself. Each takes files, one by one, that no other has taken: many tests wait, and meanwhile leave the cores
to tests of another process. A common folder is enough to agree: the first process to create a file's mark there runs
that file. Those that take longest begin first, and files whose tests wait come between files whose tests compute.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import multiprocessing.util
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from itertools import groupby
from pathlib import Path
from typing import IO, NoReturn

import pytest

WAIT = 0.2  # seconds between polls of the other processes, when this one has nothing left to do
SPREAD = "process", "distributed"  # tiers
LONGEST = "test_train.py", "test_notes.py"  # what begins last should be short


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
    """The plugin of a process forked by a `Leader`, for which it records every report."""

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
    """Forks the other processes, shows their reports, and fails if one of them does not succeed."""

    def __init__(self, count: int) -> None:
        self._exit = ExitStack()
        super().__init__(Path(self._exit.enter_context(tempfile.TemporaryDirectory(prefix="flatfsdp-tests-"))))
        self._count, self._helpers = count, list[_Forked]()

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self, session: pytest.Session) -> None:
        """One server, which a server of each process would repeat, imports what ranks need while this process imports
        the tests."""
        if not session.config.option.collectonly:
            from tests.harness import processes

            processes.share_server()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if not (session.testsfailed or session.config.option.collectonly):
            importlib.import_module("torch._dynamo")  # as optimizers do at their first step
            gc.collect()
            gc.freeze()
            for number in range(1, self._count):
                self._helpers.append(self._forked(session, number))
        return super().pytest_runtestloop(session)

    def _forked(self, session: pytest.Session, number: int) -> _Forked:
        """A process that has the collected tests already, and only imports so far: it has one thread."""
        assert threading.active_count() == 1, threading.enumerate()
        helper = _Forked(self.folder, number, session.config)
        sys.stdout.flush()
        sys.stderr.flush()
        helper.pid = os.fork()
        if helper.pid == 0:
            _run_as_helper(self, session, helper)
        self._exit.callback(helper.end)
        return helper

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
            if helper.code != pytest.ExitCode.OK:
                session.shouldfail = f"a process that shares the run ended otherwise than with its tests: {helper}"
                raise session.Failed(session.shouldfail)

    def pytest_unconfigure(self) -> None:
        self._exit.close()


def _run_as_helper(leader: Leader, session: pytest.Session, forked: _Forked) -> NoReturn:
    """The whole life of a helper after its fork. What it prints goes to a file: its reports are shown by the leader."""
    code: int = pytest.ExitCode.INTERNAL_ERROR
    atexit._clear()  # what was registered so far is for the leader's end
    atexit.register(multiprocessing.util._exit_function)  # removes semaphores that tests have made here
    try:
        plugins = session.config.pluginmanager
        capture = plugins.getplugin("capturemanager")
        capture.stop_global_capturing()  # its files have one position for all processes
        for descriptor, path in ((0, os.devnull), (1, forked.output), (2, forked.output)):
            os.dup2(os.open(path, os.O_RDWR | os.O_APPEND), descriptor)
        capture.start_global_capturing()
        capture.suspend_global_capture()
        plugins.unregister(leader)
        helper = Helper(session.config, leader.folder, forked.number)
        plugins.register(helper)
        with suppress(session.Failed, session.Interrupted):  # its reports say why, or the leader is gone
            helper.pytest_runtestloop(session)
        code = pytest.ExitCode.OK
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class _Forked:
    """A helper, from the view of its leader."""

    def __init__(self, folder: Path, number: int, config: pytest.Config) -> None:
        self._config = config
        self.number, self.pid = number, 0
        self.code: int | None = None  # its exit status, once it has ended
        self.output, reports = folder / f"{number}.output", _reports(folder, number)
        self.output.touch()
        reports.touch()
        self._reports: IO[str] = reports.open()
        self._line = ""

    def news(self) -> Iterator[pytest.TestReport]:
        while line := self._reports.readline():
            self._line += line
            if self._line.endswith("\n"):  # otherwise it is still being written
                data, self._line = self._line, ""
                yield read_report(self._config, data)

    def runs(self) -> bool:
        """Whether it still runs, after some time if it does."""
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
            else:
                time.sleep(WAIT)
        return self.code is None

    def end(self) -> None:
        if self.code is None:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        self._reports.close()

    def __str__(self) -> str:
        return f"exit code {self.code}\n{self.output.read_text(errors='replace')[-8000:]}"


def _reports(folder: Path, number: int) -> Path:
    return folder / f"{number}.reports"


def options(parser: pytest.Parser) -> None:
    parser.addoption("--processes", type=int, default=1, help="run the files of tests in as many processes at once")


def register(config: pytest.Config) -> None:
    """Share the run if the command line requests it."""
    if (count := config.getoption("--processes")) > 1:
        config.pluginmanager.register(Leader(count))
