"""Profile of a step: samples of rank 0's Python stacks, taken from outside by py-spy, by the owner of the code.

A sample belongs to the innermost frame with a known owner, so the C code of an operation counts for its caller. The C
code of autograd counts for the model's backward: its own functions, and the calls of hooks.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import statistics
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from .engines import ENGINES
from .jobs import Setting, Training
from .models import Case
from .ranks import RankFailed
from .rounds import ALONE, Cell, attempt, note, world_of
from .table import machine_line, markdown

STEPS = 40  # timed before sampling
SAMPLED = 20.0  # seconds
WRITES = 60.0  # seconds for the sampler to write its results
RATE = 250  # samples per second
FORWARD, BACKWARD, OPTIMIZER, REST = "model, forward", "model, backward in C", "optimizer", "rest"
HOW = (
    f"py-spy's samples of rank 0, {RATE} a second for {SAMPLED:.0f} seconds, by whose Python frame is the innermost, "
    "as shares of the median step that nobody samples. What an operation does in C is its caller's; what autograd does "
    "in C, the calling of hooks included, is the model's backward."
)
FILES = 12  # listed files of an engine
_FRAME = re.compile(r"(?P<name>.*) \((?P<file>.*?)(:\d+)?\)$")
_OWNERS = (
    (re.compile(r"(?:^|/)(flatfsdp/.*|torch/distributed/.*|torch/nn/parallel/.*)"), None),  # None: an engine's file
    (re.compile(r"(?:^|/)torch/optim/"), OPTIMIZER),
    (re.compile(r"(?:^|/)torch/nn/|(?:^|/)benchmark/models\.py"), FORWARD),
    (re.compile(r"(?:^|/)torch/autograd/graph\.py"), BACKWARD),
)


def is_possible() -> bool:
    """Whether py-spy is installed."""
    return shutil.which("py-spy") is not None


def profile_all(cases: Sequence[Case], engines: Sequence[str]) -> list[Cell]:
    """Results of `sample_steps` for every model and engine. Precondition: `is_possible`."""
    cells = []
    for case in cases:
        for engine in engines:
            world = ALONE if ENGINES[engine].alone else world_of("cpu")
            cell = attempt(world, sample_steps, Setting(case, engine))
            cells.append({"model": case.name, "engine": engine, **cell})
            note(cells[-1])
    return cells


def sample_steps(rank: int, setting: Setting) -> dict[str, Any]:
    """Median CPU seconds of a step without sampling, and on rank 0 samples by owner. Collective."""
    training = Training(rank, setting)
    training.warm_up()
    costs = [training.step() for _ in range(STEPS)]
    found = {name: statistics.median(cost[name] for cost in costs) for name in ("step", "cpu")}
    more = _agreed(int(SAMPLED / found["step"]) + 1)
    if rank:
        for _ in range(more):
            training.step()
        return found
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "stacks"
        sampler = ["py-spy", "record", "--rate", str(RATE), "--format", "raw", "--output", str(path)]
        with _heeding_interrupts():
            process = subprocess.Popen(
                [*sampler, "--pid", str(os.getpid())], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
            )
        with process:
            try:
                time.sleep(1.0)  # until it begins
                for _ in range(more):
                    training.step()
                process.send_signal(signal.SIGINT)  # makes it write its results
                _, complaint = process.communicate(timeout=WRITES)
            except BaseException:  # leaving the context would otherwise wait without a limit
                process.kill()
                raise
        if not path.exists():
            raise RankFailed(f"py-spy: {complaint.decode()}")
        return {**found, "owners": owners(path.read_text())}


@contextmanager
def _heeding_interrupts() -> Iterator[None]:
    """Processes started inside handle SIGINT, even if this one ignores it, like background jobs of a shell: they would
    inherit that."""
    before = signal.getsignal(signal.SIGINT)
    ignores = before is signal.SIG_IGN and threading.current_thread() is threading.main_thread()
    if ignores:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        if ignores:
            signal.signal(signal.SIGINT, before)


def _agreed(number: int) -> int:
    """The number of rank 0, on all ranks. Collective."""
    box = [number]
    if dist.is_initialized():
        dist.broadcast_object_list(box)
    return box[0]


def owners(stacks: str) -> dict[str, int]:
    """Samples within a step, by owner. `stacks`: lines of frames, outermost first, each with a count."""
    found: Counter[str] = Counter()
    for line in stacks.splitlines():
        stack, _, count = line.rpartition(" ")
        frames = stack.split(";")
        if any(frame.startswith("train_step ") for frame in frames):
            found[owner(frames)] += int(count)
    return dict(found)


def owner(frames: Sequence[str]) -> str:
    """The owner of a stack: one of the four names above, or a file of an engine."""
    for frame in reversed(frames):
        match = _FRAME.match(frame)
        for pattern, name in _OWNERS if match else ():
            if part := pattern.search(match["file"]):
                return name or part[1]
    return REST


def render(results: dict[str, Any]) -> str:
    """For each model: a column per engine, with CPU milliseconds of a step by owner."""
    machine, cells = results["machine"], results["profile"]
    lines = ["# Where a step's time goes", "", machine_line(machine), "", f"Made by `{machine['command']}`: {HOW}", ""]
    for model in dict.fromkeys(cell["model"] for cell in cells):
        chosen = {cell["engine"]: cell["ranks"][0] for cell in cells if cell["model"] == model and "ranks" in cell}
        shares = {engine: _milliseconds(found) for engine, found in chosen.items()}
        header = ["ms of CPU per step", *(ENGINES[engine].title for engine in chosen)]
        rows = [["all", *(f"{found['cpu'] * 1000:.1f}" for found in chosen.values())]]
        for part in (FORWARD, BACKWARD, OPTIMIZER, REST):
            rows.append([part, *(_cell(share, [part]) for share in shares.values())])
        files = {engine: [name for name in share if name.endswith(".py")] for engine, share in shares.items()}
        rows.append(["the engine", *(_cell(shares[engine], names) for engine, names in files.items())])
        lines += [f"## {model}", "", *markdown(header, rows)]
        for engine, names in files.items():
            largest = sorted(names, key=shares[engine].__getitem__, reverse=True)[:FILES]
            if largest:
                listed = ", ".join(f"{name} {shares[engine][name]:.1f}" for name in largest)
                lines += [f"{ENGINES[engine].title}, by file: {listed}.", ""]
        lines += [f"{ENGINES[cell['engine']].title}: {cell['error']}" for cell in cells if cell.get("error")]
    return "\n".join(lines).rstrip() + "\n"


def _milliseconds(found: dict[str, Any]) -> dict[str, float]:
    whole = sum(found["owners"].values())
    return {name: count / whole * found["cpu"] * 1000 for name, count in found["owners"].items()}


def _cell(share: dict[str, float], names: Sequence[str]) -> str:
    value = sum(share.get(name, 0.0) for name in names)
    return f"{value:.1f} ({value / sum(share.values()):.0%})" if value else ""
