"""`tools/gpu_check.py` without a card: parts survive each other, all run, and read their inputs correctly."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from flatfsdp.engine.comm.axes import served_as
from flatfsdp.engine.features.coalescing import uncoalesced
from flatfsdp.engine.transports import staged
from tests.harness.fake import fake_world
from tests.harness.fake_device import FakeDevice
from tests.harness.thorough import is_thorough
from tools.benchmark import ranks
from tools.benchmark.gpu import Kernel, by_kind, hidden
from tools.benchmark.jobs import Setting, Training
from tools.benchmark.models import Case, MLPBlock, mlp
from tools.benchmark.ranks import World
from tools.gpu import __main__ as gpu_main
from tools.gpu import books, host, memory, parity, runner, streams, tables
from tools.gpu.card import NoCard
from tools.gpu.parts import PARTS, ROOT, Part
from tools.gpu.plays import Stage
from tools.gpu.report import Findings, Report, Row
from tools.gpu.scenarios import all_scenarios
from tools.gpu.trace import STEP, Trace

pytestmark = [
    pytest.mark.single_process,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning"),
]

# --- the runner -------------------------------------------------------------------------------------------------------

FINDS = """
import json, os, sys
row = {"what": "a", "goal": "b", "found": "c", "met": True}
with open(sys.argv[1] + ".new", "w") as new:
    new.write(json.dumps({"rows": [row], "tables": [], "figures": {}, "errors": {}}))
os.replace(new.name, sys.argv[1])  # as reports are written
"""
HANGS = """
import subprocess, time
held = open(sys.argv[1] + ".held", "w")
subprocess.Popen(["sleep", "100"], pass_fds=[held.fileno()])
open(sys.argv[1] + ".hangs", "w").close()
time.sleep(100)
"""
PROGRAMS = {
    "good": FINDS,
    "dies": FINDS + "os._exit(3)",
    "hangs": FINDS + HANGS,
    "last": FINDS,
    "late": FINDS,
}


class Clock:
    """Stands for the module `time` where the runner waits: it goes on only where a test lets it."""

    def __init__(self, look: Callable[[Clock], None] = lambda clock: None) -> None:
        self.now = 0.0
        self._look = look

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        time.sleep(0.01)
        self._look(self)


def ends(pipe: int) -> bool:
    """Whether all processes that may write to `pipe` end within a minute."""
    os.set_blocking(pipe, True)
    return bool(select.select([pipe], [], [], 60.0)[0]) and os.read(pipe, 1) == b""


def test_parts_survive_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hangs, held = tmp_path / "hangs.json.hangs", tmp_path / "hangs.json.held"

    def look(clock: Clock) -> None:
        if hangs.exists():
            clock.now = 5.0

    monkeypatch.setattr(runner, "time", Clock(look))
    monkeypatch.setattr(runner, "LEAST", 60.0)
    monkeypatch.setattr(runner, "SIDE_BY_SIDE", 1)
    written: list[int] = []

    def write(outcomes: list[runner.Outcome]) -> None:
        tables.write(tmp_path, {"date": "", "device": "", "command": ""}, outcomes)
        written.append(sum(len(part["rows"]) for part in json.loads((tmp_path / "results.json").read_text())["parts"]))
        if outcomes[-1].part == "last":
            monkeypatch.setattr(runner, "LEAST", 1000.0)

    def command(part: Part, path: Path) -> list[str]:
        return [sys.executable, "-S", "-c", PROGRAMS[part.name], str(path)]

    os.mkfifo(held)
    pipe = os.open(held, os.O_RDONLY | os.O_NONBLOCK)
    try:
        parts = [Part(name, name, 4.0 if name == "hangs" else 30.0, "") for name in PROGRAMS]
        outcomes = runner.run_all(parts, command, tmp_path, tmp_path / "log.txt", 100.0, write)
        assert hangs.exists() and ends(pipe)
    finally:
        os.close(pipe)
    found = {outcome.part: [(row.found, row.met) for row in outcome.found.rows] for outcome in outcomes}
    assert found["good"] == found["last"] == [("c", True)]
    assert found["dies"] == [("c", True), ("died with status 3; log.txt has its output", False)]
    assert found["hangs"] == [("c", True), ("ended after its 4 s", False)]
    ((words, met),) = found["late"]
    assert words.startswith("not run") and met is None
    assert sorted(written) == written and written[-1] == 7
    assert [outcome.unmet for outcome in outcomes] == [0, 1, 1, 0, 0]
    text = (tmp_path / "results.md").read_text()
    assert "4 goals are met, 2 are not, 1 could not be looked at." in text and "| a | b | c | yes |" in text


# It ends when those that are named have begun, too.
MEETS = """
import os, sys, time
folder, name, *others = sys.argv[1:]
open(f"{folder}/began-{name}", "w").close()
deadline = time.monotonic() + 60
while not all(os.path.exists(f"{folder}/began-{other}") for other in others) and time.monotonic() < deadline:
    time.sleep(0.005)
open(f"{folder}/ended-{name}", "w").close()
sys.exit(time.monotonic() >= deadline)
"""


def test_parts_that_time_nothing_run_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "POLL", 0.01)
    monkeypatch.setattr(runner, "SIDE_BY_SIDE", 3)
    together = {"a": "bc", "b": "ac", "c": "ab", "timed": "", "d": "e", "e": "d"}
    parts = [Part(name, name, 90.0, "", timed=name == "timed") for name in together]
    ended: dict[str, str] = {}  # before each was begun

    def command(part: Part, path: Path) -> list[str]:
        ended[part.name] = "".join(name for name in together if (tmp_path / f"ended-{name}").exists())
        return [sys.executable, "-S", "-c", MEETS, str(tmp_path), part.name, *together[part.name]]

    outcomes = runner.run_all(parts, command, tmp_path, tmp_path / "log.txt", 400.0, lambda outcomes: None)
    assert [outcome.part for outcome in outcomes] == [part.name for part in parts]
    assert not any(outcome.found.rows for outcome in outcomes)
    assert ended == {"a": "", "b": "", "c": "", "timed": "abc", "d": "abctimed", "e": "abctimed"}
    lines = (tmp_path / "log.txt").read_text().split()
    assert sorted(lines[1::3]) == sorted(together)


def test_what_ranks_import_first_asks_for_no_device() -> None:
    """A process that has counted devices cannot fork processes that use them."""
    asks = "def asks(*_): raise SystemExit('a device was asked for')"
    replaced = "torch.cuda.is_available = torch.cuda.device_count = torch.accelerator.is_available = asks"
    names = ", ".join(gpu_main.PRELOADED)
    program = f"import torch, torch.distributed.fsdp\n{asks}\n{replaced}\nimport {names}"
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True, timeout=60)


def test_every_part_has_a_module_and_all_fit_roughly_into_the_budget() -> None:
    for part in PARTS.values():
        assert (ROOT / "tools" / "gpu" / f"{part.module}.py").exists()
    first = [PARTS[name].seconds for name in ("one_rank", "memory", "streams", "host")]
    assert sum(first) <= 8 * 60


def test_without_a_card_it_reports_it() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    from tools import gpu_check

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["gpu_check"])
        assert gpu_check.main() == 2


@pytest.mark.skipif(not is_thorough(), reason="minutes; with --thorough")
def test_all_parts_from_end_to_end(tmp_path: Path) -> None:
    command = [sys.executable, "tools/gpu_check.py", "--device", "cpu", "--brief", "--out", str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=900)
    found = json.loads((tmp_path / "results.json").read_text())
    assert [part["part"] for part in found["parts"]] == ["needs", *PARTS]
    unmet = [row for part in found["parts"] for row in part["rows"] if row["met"] is False and row["what"] != "torch"]
    assert not unmet, ran.stdout


# --- the parts, in this process ---------------------------------------------------------------------------------------


@contextmanager
def group_of(world: World) -> Iterator[None]:
    if world.backend == "fake":
        with fake_world(world.size):
            yield
    elif world.backend:
        dist.init_process_group(world.backend, store=dist.HashStore(), rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()
    else:
        yield


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As ranks have it: tensors are small, and other tests run at the same time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def here(one_thread: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs run in this process."""

    def run(world: World, job: Callable[..., Any], *args: Any, timeout: float = 0.0) -> list[Any]:
        with group_of(world):
            return [job(0, *args)]

    monkeypatch.setattr(ranks, "run", run)


class Stand(NoCard):
    """A CPU that passes for a card of which everything is the same number of bytes."""

    is_real = True

    def allocated(self) -> int:
        return 2**20

    def peaks(self) -> tuple[int, int]:
        return 2**20, 2**20

    def peak_in_use(self) -> int:
        return 2**20


TRIED = ("fully_shard, small units joined, bf16", "two microbatches, deferred reductions")  # without --thorough


@pytest.mark.parametrize(
    "scenario",
    [scenario for scenario in all_scenarios() if is_thorough() or scenario.name in TRIED],
    ids=lambda scenario: scenario.name,
)
def test_scenarios_are_as_one_process_and_happen_in_order(scenario: Any, one_thread: None, tmp_path: Path) -> None:
    """On one rank, where little travels; and on one of four, whose numbers mean nothing."""
    report = Report(tmp_path / "found.json")
    with group_of(World(1, "gloo")):
        parity.play(0, 1, NoCard(), report, scenario)
    (row,) = report.found.rows
    assert row.met, report.found.errors
    if any(word in scenario.name for word in ("half-way", "overflows", "nonfinite", "poisoned")):
        return  # these need the values of others
    with fake_world(4), FakeDevice() as device:
        scenario.play(Stage(0, 4, torch.device("cpu"), scenario.wrap, scenario.course))
    assert device.races == []


def test_scenarios_survive_one_that_ranks_do_not_live_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [scenario.name for scenario in all_scenarios()]
    report = Report(tmp_path / "found.json")

    def run(world: World, job: Callable[..., Any], path: Path, kind: str, given: list[str], timeout: float) -> None:
        inside = Report(path)
        for name in given:
            if name in (names[2], names[-1]):
                raise ranks.RankFailed("rank 1 died by SIGSEGV")
            inside.goal(name, "", "", True)

    monkeypatch.setattr(ranks, "run", run)
    parity.run(report, NoCard(), "two ranks", brief=False)
    assert [row.what for row in report.found.rows] == names
    failed = [(row.what, row.found) for row in report.found.rows if not row.met]
    assert failed == [(name, "RankFailed: rank 1 died by SIGSEGV") for name in (names[2], names[-1])]


def test_scenarios_have_names_of_their_own() -> None:
    names = [scenario.name for scenario in all_scenarios()]
    assert len({*names}) == len(names)
    from tools.gpu import nccl

    assert {*parity.BRIEF, *nccl.ONE, *nccl.TWO} <= {*names}


def rows_of(report: Report) -> dict[str, bool | None]:
    return {row.what: row.met for row in report.found.rows}


def test_streams_of_a_step(here: None, tmp_path: Path) -> None:
    report = Report(tmp_path / "found.json")
    streams.run(report, NoCard(), brief=True)
    assert not report.found.errors
    assert rows_of(report)["flatfsdp, bf16: record_stream"] is True
    figures = report.found.figures["bf16"]["flatfsdp"]
    assert figures["collectives"] == 3 * 4 + 1 and figures["kernels"] == 0


class CopiesByStream(TorchDispatchMode):
    """Counts the calls that copy, by the stream on which."""

    def __init__(self, device: FakeDevice) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "copy" in func._schema.name or func._schema.name == "aten::cat":
            self.calls[self._device.current_stream().name] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("backend", ["nccl", "fake"])
@pytest.mark.parametrize("engine", streams.OURS[::2])
def test_copies_on_streams_are_as_few_as_goals_have_them(
    engine: str, backend: str, one_thread: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call is a kernel of a card: `tests/comm/test_tensor_lists.py`."""
    monkeypatch.setattr(staged, "is_ordered", lambda target: True)
    case = Case("small biases", partial(mlp, 3, 1, 128), MLPBlock, 4, 128, 1)
    setting = Setting(case, engine, bf16=True)
    with fake_world(8), FakeDevice() as device, uncoalesced():
        with served_as(backend):
            training = Training(0, setting)
            training.warm_up()
        with CopiesByStream(device) as copies:
            training.step()
    assert not device.races
    least = streams.least_with_staging(setting) if (engine, backend) == (streams.FRONT, "fake") else 2 * 3
    assert copies.calls["unshard"] + copies.calls["reduce"] == least


@pytest.mark.skipif(not is_thorough(), reason="seconds; with --thorough")
def test_host_times(here: None, tmp_path: Path) -> None:
    report = Report(tmp_path / "found.json")
    host.run(report, NoCard(), brief=True)
    assert not report.found.errors
    assert rows_of(report) == {f"flatfsdp: host time per unit of {n} tensors": None for n in (2, 12)}


@pytest.mark.skipif(not is_thorough(), reason="seconds; with --thorough")
def test_memory_of_a_model(here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a card with equal results: a goal "less than others" is missed, a goal "at most as much" is met."""
    monkeypatch.setattr(memory, "card_of", lambda kind: Stand())
    monkeypatch.setattr(memory, "BILLION", memory.TINY)
    monkeypatch.setattr(memory, "OURS", memory.OURS[:1])
    monkeypatch.setattr(memory, "LATE", 4)
    report = Report(tmp_path / "found.json")
    memory.run(report, Stand(), brief=False)
    assert not report.found.errors
    found = rows_of(report)
    assert found["fake group of 8, flatfsdp: memory over steps"] is True
    assert found["fake group of 8, flatfsdp: peak in use"] is False
    assert found["one rank, flatfsdp: peak in use"] is True
    assert found["optimizer state after a step"] is False  # there are no books
    assert report.found.figures["terms"]["formula"]["params"] > 0


# --- inputs -----------------------------------------------------------------------------------------------------------


def test_what_is_hidden_by_kind() -> None:
    spin = "void spin_kernel(long)"
    kernels = [
        Kernel(spin, 7, 0.0, 10.0, place=1),
        Kernel("gemm", 1, 5.0, 20.0, place=2),
        Kernel(spin, 9, 10.0, 20.0, place=3),
        Kernel(spin, 7, 20.0, 30.0, place=4),
    ]
    issued = ["_allgather_base_", "_reduce_scatter_base_", "_allgather_base_"]
    kinds = by_kind(kernels, issued)
    assert {kind: hidden(some, kernels) for kind, some in kinds.items()} == {"all_gather": 0.25, "reduce_scatter": 1.0}
    assert by_kind(kernels, issued[:2]) == {}


def test_what_the_host_called_in_a_step() -> None:
    def call(name: str, at: float) -> dict[str, Any]:
        return {"name": name, "cat": "cuda_runtime", "ts": at, "dur": 1.0, "args": {}}

    step = {"name": STEP, "cat": "user_annotation", "ts": 10.0, "dur": 10.0}
    events = [
        call("cudaDeviceSynchronize", 5.0),
        step,
        call("cudaEventSynchronize", 12.0),
        call("cudaLaunchKernel", 13.0),
    ]
    trace = Trace({"traceEvents": [*events, call("cudaDeviceSynchronize", 25.0)]})
    assert trace.waits() == {"cudaEventSynchronize": 1}
    assert trace.calls()["cudaLaunchKernel"] == 1


def frames(*names: str) -> list[dict[str, Any]]:
    return [{"filename": name, "line": 1, "name": "f"} for name in names]


def test_whose_memory_it_is() -> None:
    unit, model = "/site/flatfsdp/engine/device/memory.py", "/repo/tools/benchmark/models.py"
    assert books.owner(frames(unit, model, unit)) == "engine"
    assert books.owner(frames("/torch/_ops.py", "/torch/nn/functional.py", model, unit)) == "model"
    assert books.owner(frames("/site/torch/optim/adamw.py", unit)) == "optimizer"
    assert books.owner([]) == "rest"
    block = {"state": "active_allocated", "size": 512, "requested_size": 500, "frames": frames(unit)}
    freed = block | {"state": "inactive"}
    assert books.held({"segments": [{"blocks": [block, freed]}, {"blocks": [block]}]}) == {"engine": 1000}

    def event(action: str, address: int, size: int, *where: str) -> dict[str, Any]:
        return {"action": action, "addr": address, "size": size, "frames": frames(*where)}

    events = [
        event("alloc", 1, 10, unit),
        event("alloc", 2, 7, model),
        event("alloc", 3, 20, unit),
        event("free_requested", 1, 10),
        event("free_completed", 1, 10),
        event("alloc", 1, 5, unit),
    ]
    assert books.at_peak_of("engine", {"device_traces": [events]}) == {"engine": 30, "model": 7}


def test_findings_outlive_the_process_that_wrote_them(tmp_path: Path) -> None:
    report = Report(tmp_path / "found.json")
    report.goal("a", "b", "c", False)
    report.table("t", ("x",), [("1",)])
    report.numbers("n", [1])
    report.failed("d", "e", ValueError("f"))
    again = Findings.read(tmp_path / "found.json")
    assert again == report.found
    assert again.rows[1] == Row("d", "e", "ValueError: f", False) and "ValueError: f" in again.errors["d"]
