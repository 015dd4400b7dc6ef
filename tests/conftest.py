"""Fixtures and settings of every test: the repository on the path, a folder of its own, pools of ranks, torch's
deprecations as errors."""

from __future__ import annotations

import atexit
import gc
import itertools
import multiprocessing.process
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

# Spawned ranks inherit this path: they import the test modules that hold their functions. So do started commands.
ROOT = str(Path(__file__).resolve().parent.parent)
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)
if ROOT not in os.environ.get("PYTHONPATH", "").split(os.pathsep):
    os.environ["PYTHONPATH"] = os.pathsep.join([ROOT, *filter(None, [os.environ.get("PYTHONPATH")])])
# torch's store asks the name server for the name of each connection. Where an answer is lost, glibc asks again after 5
# seconds, as often in a run as a hundredth of its connections.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:5")

from tests.harness import sharing, thorough  # noqa: E402

TIERS = {  # a test belongs to the first of these in which it can fail
    "unit": "no process group",
    "single_process": "one rank of a simulated job",
    "distributed": "ranks in a pool of processes",
    "process": "programs in separate processes",
}
Run = Callable[..., list[Any]]  # run(fn, *args, timeout=120, **kwargs): every rank's result


def pytest_addoption(parser: pytest.Parser) -> None:
    sharing.options(parser)
    thorough.options(parser)


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # until all tests are imported, most of which stays
    sharing.register(config)
    thorough.register(config)
    for tier, meaning in TIERS.items():
        config.addinivalue_line("markers", f"{tier}: {meaning}")
    config.addinivalue_line(
        "markers", "ranks(world, fn, *args, of=[], in_folder=False, **kwargs): the job of `tests.harness.fresh`"
    )
    # FutureWarning is an error by the settings in pyproject.toml; this is the other form that torch uses.
    config.addinivalue_line("filterwarnings", r"error::DeprecationWarning:torch\.distributed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test has one tier."""
    wrong = {item.path.name for item in items if sum(map(bool, map(item.get_closest_marker, TIERS))) != 1}
    if wrong:
        raise pytest.UsageError(f"pytestmark of these files has no tier, or several, of {[*TIERS]}: {sorted(wrong)}")


_ENDED = itertools.count(1)


def pytest_collection_finish() -> None:
    """The collector need not go through torch's objects and all tests each time: that was a sixth of the time of tests
    in this process."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Nor need it go through what earlier tests have left: imports, caches and reports. After the last test of a file
    its ranks may have nothing to do for long."""
    if next(_ENDED) % 50 == 0:
        gc.collect()
        gc.freeze()
    pool = sys.modules.get("tests.harness.pool")
    if pool is not None and (nextitem is None or nextitem.path != item.path):
        pool.pause_all()


@pytest.fixture(autouse=True)
def no_wait_is_left() -> Iterator[None]:
    """What a test leaves among the waits of this process is reported to a user as a rank that hangs, and keeps the
    watches of later tests busy."""
    yield
    waits = sys.modules.get("flatfsdp.engine.base.wait_limits")
    if waits is not None:
        left = {**waits.issued, **waits.blocking}
        waits.issued.clear()
        assert not left, f"waits that were never over: {left}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """A test, with its fixtures, runs in an empty folder of its own, and so do the ranks and commands that it starts:
    what lies where pytest was started does not change what it finds, and it leaves nothing there."""
    before = os.getcwd()
    _enter(tempfile.mkdtemp(dir=_folders()))
    try:
        return (yield)
    finally:
        _enter(before)


@cache
def _folders() -> str:
    """They stay until the end of the run: jobs of later tests of a file may be starting in the folder of an earlier
    one."""
    folder = tempfile.mkdtemp(prefix="flatfsdp-tests-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _enter(folder: str) -> None:
    os.chdir(folder)
    multiprocessing.process.ORIGINAL_DIR = folder  # type: ignore[attr-defined]  # where processes that it spawns start


def pytest_report_header() -> str | None:
    return thorough.header()


@pytest.fixture(scope="session", autouse=True)
def _pools_end_with_the_session() -> Iterator[None]:
    yield
    from tests.harness import pool

    pool.discard_all()


@pytest.fixture
def run() -> Run:
    """``run(world, fn, *args)``: `tests.harness.pool.run`."""
    from tests.harness import pool

    return pool.run


@pytest.fixture
def pool2(run: Run) -> Run:
    """``pool2(fn, *args)`` on two ranks."""
    return partial(run, 2)


@pytest.fixture
def pool3(run: Run) -> Run:
    """``pool3(fn, *args)`` on three ranks."""
    return partial(run, 3)


@pytest.fixture
def pool4(run: Run) -> Run:
    """``pool4(fn, *args)`` on four ranks."""
    return partial(run, 4)


@pytest.fixture(scope="module")
def _started(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    from tests.harness import fresh

    own = [item for item in request.session.items if item.path == request.path]
    with fresh.started(own, tmp_path_factory.mktemp("ranks")) as jobs:
        yield jobs


@pytest.fixture
def outcomes(request: pytest.FixtureRequest, _started: dict[str, Any]) -> list[Any]:
    """The end of each rank of the job that the test's mark names, as a `tests.harness.fresh.Outcome`."""
    return _started[request.node.nodeid].outcomes.result()


@pytest.fixture
def folder(request: pytest.FixtureRequest, _started: dict[str, Any]) -> Path:
    """The folder of that job."""
    return _started[request.node.nodeid].folder
