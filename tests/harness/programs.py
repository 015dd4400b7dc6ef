"""Runs a program of another framework on new ranks, on torch's FSDP and under `flatfsdp.as_torch`, and compares the
outcomes that it wrote (`tests/programs/frameworks/outcome`)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ROOT / "tests" / "programs" / "frameworks"
WORDS = 6000  # characters of a failed program's output


class ProgramError(Exception):
    """A program failed, or exceeded its limit."""


@dataclass(frozen=True)
class Case:
    """A program and its reference: itself on torch's FSDP, with the same arguments unless others are given.

    Attributes:
        arguments: follow the folder that the program writes to; ``{theirs}`` is the folder of torch's side, ``{other}``
            that of the other side.
        needs: the packages without which it is skipped.
        bound: the largest allowed difference of numbers and shards; 0.0 means bit by bit.
        parts: the compared parts of the outcome, by the beginning of their files' names.
        runs: the arguments of runs before the compared one, in the same folder; both sides have finished theirs
            before it begins.
    """

    name: str
    program: str
    arguments: tuple[str, ...]
    needs: tuple[str, ...]
    ranks: int = 2
    bound: float = 0.0
    parts: tuple[str, ...] = ("",)
    runs: tuple[tuple[str, ...], ...] = ()
    theirs: tuple[str, ...] | None = None
    why: str = ""


@dataclass(frozen=True)
class Result:
    """The comparison of two outcomes.

    Attributes:
        largest: the largest difference of a number or an element of a shard.
        where: the place of the largest difference.
        problems: all other differences.
    """

    largest: float
    compared: int
    problems: tuple[str, ...]
    seconds: tuple[float, float]
    where: str = ""


def exit_code_of(command: Sequence[str], printed: IO[str], limit: float, **how: Any) -> int | None:
    """Run `command`, with output to `printed`; None where it exceeded `limit` seconds: then it is killed, with all
    processes that it has started. `how`: arguments of `subprocess.Popen`."""
    process = subprocess.Popen(command, stdout=printed, stderr=subprocess.STDOUT, start_new_session=True, **how)
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def launch(case: Case, arguments: tuple[str, ...], folder: Path, *, ours: bool, limit: float) -> None:
    """Run the program of `case` on its ranks, at most `limit` seconds.

    Raises:
        ProgramError: it failed, or did not end in time; with the end of its output.
    """
    environment = {
        name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }
    environment |= {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "TOKENIZERS_PARALLELISM": "false"}
    environment |= {"HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={case.ranks}"]
    command += ["-m", "flatfsdp.as_torch"] if ours else []
    command += [str(PROGRAMS / case.program), str(folder), *arguments]
    log = folder / "printed.txt"
    with log.open("a") as printed:
        code = exit_code_of(command, printed, limit, env=environment, cwd=folder)
    if code != 0:
        ended = f"still ran after {limit:g} s" if code is None else f"ended with {code}"
        side = "under flatfsdp.as_torch" if ours else "on torch's FSDP"
        raise ProgramError(f"{' '.join(command[-len(arguments) - 2 :])} {side} {ended}:\n{_end_of(log)}")


def _end_of(log: Path) -> str:
    """The first traceback of a rank, not the launcher's; or else the end of the output."""
    lines = log.read_text(errors="replace").splitlines()
    begins = [i for i, line in enumerate(lines) if line.startswith("[rank") and "Traceback" in line]
    if not begins:
        return "\n".join(lines)[-WORDS:]
    mark = lines[begins[0]].partition(":")[0]
    return "\n".join(line for line in lines[begins[0] :] if line.startswith(mark))[-WORDS:]


def run(case: Case, folder: Path, *, limit: float) -> Result:
    """Run both sides of `case` below `folder`, `limit` seconds each run, and compare.

    Raises:
        ProgramError: a run failed, including torch's side, which is the reference.
    """
    seconds = [0.0, 0.0]
    folders = folder / "theirs", folder / "ours"
    for place in folders:
        place.mkdir(parents=True)
    for number in range(len(case.runs) + 1):
        for ours, place in enumerate(folders):
            last = case.theirs if case.theirs is not None and not ours else case.arguments
            arguments = (*case.runs, last)[number]
            named = tuple(each.format(theirs=folders[0], other=folders[not ours]) for each in arguments)
            begun = time.monotonic()
            launch(case, named, place, ours=bool(ours), limit=limit)
            seconds[ours] += time.monotonic() - begun
    return compared(case, *folders, seconds=(seconds[0], seconds[1]))


def compared(case: Case, theirs: Path, ours: Path, *, seconds: tuple[float, float]) -> Result:
    apart, count, problems = {"": 0.0}, 0, []
    for part in case.parts:
        for rank in range(case.ranks):
            one, two = (_outcome(place / f"{part}rank{rank}.pt") for place in (theirs, ours))
            where = f"{part}rank {rank}"
            if two["fsdp"] != "flatfsdp" or one["fsdp"] != "torch":
                problems.append(f"{where}: sharded by {one['fsdp']} and {two['fsdp']}")
            if len(one["values"]) != len(two["values"]):
                problems.append(f"{where}: {len(one['values'])} and {len(two['values'])} numbers")
            for number, (a, b) in enumerate(zip(one["values"], two["values"], strict=False)):
                apart[f"{where}: number {number}, {a} and {b}"] = _apart(torch.tensor(a), torch.tensor(b))
                count += 1
            if [*one["parameters"]] != [*two["parameters"]]:
                problems.append(f"{where}: parameters {[*one['parameters']]} and {[*two['parameters']]}")
            for name in one["parameters"].keys() & two["parameters"].keys():
                a, b = one["parameters"][name], two["parameters"][name]
                if a["spec"] != b["spec"] or a["local"].shape != b["local"].shape:
                    problems.append(f"{where}: {name} is {a['spec']} and {b['spec']}")
                else:
                    apart[f"{where}: {name}"] = _apart(a["local"], b["local"])
                    count += a["local"].numel()
    largest = max(apart.values())
    first = next(each for each, value in apart.items() if value) if largest else ""
    at = next(each for each, value in apart.items() if value == largest)
    return Result(largest, count, tuple(problems), seconds, f"{at}; first at {first}" if largest else "")


def _outcome(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(path, weights_only=True)
    return found


def _apart(one: torch.Tensor, two: torch.Tensor) -> float:
    """The largest difference; infinite where only one of two values is finite."""
    if not one.numel() or torch.equal(one, two):
        return 0.0
    apart = (one.double() - two.double()).abs().max().item()
    return float("inf") if apart != apart else apart
