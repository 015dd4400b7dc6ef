"""Trains one model in all ways that `deterministic_sums=True` supports, on 1, 2, 3, 4, 6 and 8 ranks, and compares the
hashes of parameters and optimizer states.

    .venv/bin/python -m tools.same_bits [--steps N] [--worlds N ...] [--lanes N] [--results FILE] [--report FILE]

Each finished run is a line in the results file, with its hash. A later call with the same file plays what is left: the
runs that no call has finished, those with another number of steps, and those that failed. Ways that compute the same
(all but mixed precision) are compared with one run on one rank, the others with their own. Each lane plays one run at a
time, by ranks that stay for the next run: while those of one run wait for each other, those of another compute.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import torch

from tests.features import test_deterministic_sums as trained
from tests.features.test_deterministic_sums import aligned, in_turns, wrapped
from tests.harness import pool
from tests.harness.processes import end_with_the_server
from tools.run_random import ROOT, commit

RESULTS = ROOT / "build" / "same_bits.jsonl"
WORLDS = (1, 2, 3, 4, 6, 8)
COUNT = 12  # microbatches of a step


def unevenly(count: int, world: int) -> list[int]:
    """Aligned, but the first rank has those of the last one, too. All ranks take as many turns as the first."""
    return [owner if owner < world - 1 else 0 for owner in aligned(count, world)]


OWNERS = {"aligned": aligned, "in turns": in_turns, "unevenly": unevenly}
LIMIT = 300.0  # seconds of a run; the longest take less than a minute


def hybrid(net: Any, *, shards: int, front: str = "", **options: Any) -> Any:
    """Replicas of groups of so many ranks."""
    mesh = torch.distributed.get_world_size() // shards, shards
    if front == "fully_shard":
        return trained.sharded(net, mesh=trained.named_mesh(*mesh))
    return wrapped(net, mesh=mesh, **options)


PREFETCH = {"forward_prefetch": True, "backward_prefetch": "BACKWARD_PRE", "join_units_below": 0}
CLIPPED = {
    **trained.WRAPS,
    "prefetch in both": partial(wrapped, **PREFETCH),
    "no prefetch": partial(wrapped, backward_prefetch=None, join_units_below=0),
}
HYBRIDS = {
    "HYBRID_SHARD": partial(hybrid, sharding_strategy="HYBRID_SHARD"),
    "HYBRID_SHARD, flat": partial(hybrid, sharding_strategy="HYBRID_SHARD", use_orig_params=False),
    "HYBRID_SHARD_ZERO2": partial(hybrid, sharding_strategy="_HYBRID_SHARD_ZERO2"),
    "hybrid of fully_shard": partial(hybrid, front="fully_shard"),
}
THREE = {name: trained.WRAPS[name] for name in ("originals", "flat", "fully_shard")}
BF16 = {
    "bf16": trained.in_bf16,
    "bf16, flat": partial(trained.in_bf16, use_orig_params=False),
    "bf16, NO_SHARD": partial(trained.in_bf16, sharding_strategy="NO_SHARD"),
    "bf16, fully_shard": trained.sharded_in_bf16,
}


@dataclass(frozen=True)
class Job:
    """One training: its `group` has one hash."""

    group: str
    name: str
    world: int
    owners: str
    accumulates: bool
    messages: bool
    play: Callable[[int], str]  # of a number of steps

    @property
    def compared(self) -> str:
        """The runs with which it is compared."""
        return f"{self.group}, {self.name.split(',')[0]}" if self.group == "resumed" else self.group

    @property
    def key(self) -> str:
        how = "no_sync" if self.accumulates else "reduced each time"
        return f"{self.group}: {self.name}, {self.world} ranks, {self.owners}, {how}" + ", messages" * self.messages


def jobs(worlds: list[int]) -> Iterator[Job]:
    """All runs. The first of a group is that of one rank, with which the others are compared."""
    for world in (1, *(each for each in worlds if each > 1)):
        ways: list[tuple[str, str, Any, Any, dict[str, Any]]] = []
        ways += [("clipped", name, trained.train, wrap, {"clips": True}) for name, wrap in CLIPPED.items()]
        for shards in (each for each in range(2, world) if world % each == 0):
            kinds = {
                f"{name}, {world // shards} x {shards}": partial(each, shards=shards) for name, each in HYBRIDS.items()
            }
            ways += [("clipped", name, trained.train, wrap, {"clips": True}) for name, wrap in kinds.items()]
        recomputed = {"clips": True, "recomputed": True}
        ways += [("clipped", f"checkpoints, {name}", trained.train, wrap, recomputed) for name, wrap in THREE.items()]
        ways += [("in backward", name, trained.stepped_in_backward, wrap, {}) for name, wrap in THREE.items()]
        ways += [("bf16", name, trained.train, wrap, {"recomputed": True}) for name, wrap in BF16.items()]
        for number, (group, name, train, wrap, given) in enumerate(ways):
            for accumulates in (True, False):
                turn = number // 3 + world + accumulates
                owners = [*OWNERS][turn % 3] if world > 1 else "aligned"
                messages = world > 1 and turn % 2 == 0
                play = partial(played, world, train, wrap, OWNERS[owners], accumulates, messages, given)
                yield Job(group, name, world, owners, accumulates, messages, play)
    for name, wrap in THREE.items():
        yield Job("resumed", f"{name}, never stopped", 1, "in turns", True, False, partial(resumed, wrap, None))
        yield Job("resumed", f"{name}, 3 ranks before", 2, "in turns", True, False, partial(resumed, wrap, 3))


def played(
    world: int, train: Any, wrap: Any, owners: Any, accumulates: bool, messages: bool, given: dict[str, Any], steps: int
) -> str:
    """The hash of all ranks."""
    given = {**given, "steps": steps}
    run = partial(pool.run, world, timeout=LIMIT)
    if messages:
        found = run(trained.through_messages, wrap, COUNT, owners, accumulates, play=train, **given)
    else:
        found = run(train, wrap, COUNT, owners, accumulates, **given)
    return " and ".join(sorted({*found}))


def resumed(wrap: Any, before: int | None, steps: int) -> str:
    """The hash of a training, whose first half so many other ranks have done."""
    with tempfile.TemporaryDirectory() as folder:
        if before is None:
            found = pool.run(1, trained.stopped, wrap, folder, 0, steps, timeout=LIMIT)
        else:
            pool.run(before, trained.stopped, wrap, folder, 0, steps // 2, timeout=LIMIT)
            found = pool.run(2, trained.stopped, wrap, folder, steps // 2, steps, timeout=LIMIT)
    return " and ".join(sorted({*found}))


@dataclass(frozen=True)
class Result:
    """The hash of a run; "" if it has failed, with `words`."""

    key: str
    steps: int
    hash: str
    seconds: float
    commit: str
    ended: str
    words: str = ""


def run_job(job: Job, steps: int, revision: str) -> Result:
    """Play it. A run that fails or hangs is a result, too."""
    began, found, words = time.monotonic(), "", ""
    try:
        found = job.play(steps)
    except Exception as error:
        story = str(error) if isinstance(error, pool.JobFailed) else traceback.format_exc()
        words = story[-3000:]
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    return Result(job.key, steps, found, round(time.monotonic() - began, 2), revision, now, words)


def report(every: list[Job], results: dict[str, Result], command: str) -> tuple[str, list[str]]:
    """The table as Markdown, and the runs that failed or have another hash than the first of their group."""
    expected: dict[str, str] = {}
    wrong, rows = [], []
    for job in every:
        result = results.get(job.key)
        if result is None:
            continue
        first = expected.setdefault(job.compared, result.hash)
        if not result.hash or result.hash != first:
            wrong.append(f"{job.key}: {result.words.strip() or f'{result.hash}, expected {first}'}")
        how = "under no_sync" if job.accumulates else "each time"
        through = "one rank" if job.world == 1 else "messages" if job.messages else "shared memory"
        shown = result.hash[:16] if " " not in result.hash else result.hash
        rows.append(
            f"| {job.group} | {job.name} | {job.world} | {job.owners} | {how} | {through} | {shown or 'failed'} |"
        )
    played = [results[job.key] for job in every if job.key in results]
    commits = ", ".join(sorted({each.commit for each in played}))
    dates = sorted(each.ended[:10] for each in played)
    lines = [
        "# One hash on any number of ranks",
        "",
        f"`{command}`: {len(played)} of {len(every)} runs, {len(wrong)} of them with another hash than the first of "
        f"their group, or failed; all their seconds are {sum(each.seconds for each in played) / 60:.1f} minutes, of "
        "which several lanes play at a time. Each trains one model, with "
        f"a tied, a frozen and a rarely used layer, for {played[0].steps if played else 0} steps of {COUNT} "
        "microbatches by AdamW. The hash is that of all parameters and optimizer states. Groups: `clipped` by the "
        "norm; `in backward`: stepped there, without clipping; `bf16`: mixed precision with float32 sums, activation "
        "checkpoints, without clipping; `resumed`: the first half on three ranks, the second on two.",
        "",
        f"Commit {commits or '-'}, {' to '.join(sorted({*dates[:1], *dates[-1:]}))}, torch {torch.__version__}, Python "
        f"{platform.python_version()}, gloo ranks on {os.cpu_count()} processors.",
        "",
        "| group | way | ranks | microbatches | reduced | exchange | hash |",
        "|---|---|---|---|---|---|---|",
        *rows,
    ]
    return "\n".join([*lines, *(f"\nWrong: {each}" for each in wrong)]) + "\n", wrong


def _lane() -> None:
    """Called first in the process of a lane, which has ranks of its own: they end with it, and it with its parent."""
    # Multiprocessing would ask the ranks to end, which those that are paused never do.
    Finalize(None, pool.discard_all, exitpriority=1)
    if pool.CAN_PAUSE:
        end_with_the_server()


def _in_lanes(left: list[Job], steps: int, lanes: int) -> Iterator[tuple[Job, Result]]:
    """Each of `left` with its result, as soon as that is there."""
    revision = commit()
    with ProcessPoolExecutor(lanes, get_context("spawn"), initializer=_lane) as executor:
        running = {executor.submit(run_job, job, steps, revision): job for job in left}
        try:
            for each in as_completed(running):
                yield running[each], each.result()
        finally:
            executor.shutdown(cancel_futures=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="tools.same_bits", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=50, help="of each run (default: 50)")
    parser.add_argument("--worlds", type=int, nargs="+", default=WORLDS, metavar="N", help="numbers of ranks")
    parser.add_argument("--lanes", type=int, default=2, metavar="N", help="runs at a time (default: 2)")
    parser.add_argument("--only", default="", metavar="TEXT", help="play only runs with this in their names")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FILE", help="default: build/same_bits.jsonl")
    parser.add_argument("--report", type=Path, metavar="FILE", help="also write the report to this file")
    given = parser.parse_args(arguments)
    every = [*jobs(list(given.worlds))]
    firsts = {each.compared: each for each in reversed(every)}
    every = [each for each in every if given.only in each.key or each is firsts[each.compared]]
    given.results.parent.mkdir(parents=True, exist_ok=True)
    lines = given.results.read_text().splitlines() if given.results.exists() else []
    found = [Result(**json.loads(line)) for line in lines if line.endswith("}")]
    results = {each.key: each for each in found if each.hash and each.steps == given.steps}
    command = f"python -m tools.same_bits --steps {given.steps} --worlds {' '.join(map(str, given.worlds))}"
    for job, result in _in_lanes([job for job in every if job.key not in results], given.steps, given.lanes):
        results[job.key] = result
        with given.results.open("a") as file:
            file.write(json.dumps(asdict(result)) + "\n")
        shown = result.hash[:16] or "failed"
        _say(f"{len(results)} of {len(every)}: {job.key}: {shown}, {result.seconds:.1f} s")
        _, wrong = report(every, results, command)
        for words in (each for each in wrong if each.startswith(f"{job.key}: ")):
            _say(f"WRONG: {words}")
    text, wrong = report(every, results, command)
    if given.report is not None:
        given.report.write_text(text)
    _say("\n".join([*text.splitlines()[:3], *wrong]))
    return int(bool(wrong))


def _say(words: str) -> None:
    sys.stdout.write(f"{words}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
