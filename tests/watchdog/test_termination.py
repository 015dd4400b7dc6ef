"""SIGTERM after the loss of a rank, as launchers send it: one line names that rank, and the exit status stays."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from flatfsdp.engine.base.foreign_text import parse
from flatfsdp.engine.base.processes import ProcessIdentity
from flatfsdp.engine.watchdog.regions import current_watch
from flatfsdp.engine.watchdog.store import StoreClient
from tests.agreement.test_agreement import step
from tests.harness import commands
from tests.trainer.test_train import environment
from tests.watchdog.test_faults import killed, trained

pytestmark = pytest.mark.process

LIMIT = 120.0  # seconds for all ranks to end; on idle cores it takes 5

PROGRAM = """
import os, signal, time
import torch, torch.distributed as dist
from flatfsdp import FullyShardedDataParallel

dist.init_process_group("gloo")
model = FullyShardedDataParallel(torch.nn.Linear(4, 4))
for count in range(5):
    if count == 2 and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if count == 2 and dist.get_rank() == 2:
        time.sleep(60)  # it does not notice anything
    model(torch.ones(2, 4)).sum().backward()
"""


def test_torchrun_ends_the_others_after_they_named_a_killed_rank(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    done = commands.torchrun(3, "program.py", folder=tmp_path, environment=environment(), limit=2 * LIMIT)
    named = r"^\[flatfsdp, rank (\d)\] LostRankError: rank 1 was killed, or crashed: process \d+ on .* is gone\. The "
    found = re.findall(rf"{named}remaining ranks cannot continue$", done.stderr, re.MULTILINE)
    assert sorted(found) == ["0", "2"], done.stderr
    statuses = dict(re.findall(r"rank +: (\d).*\n +exitcode +: (-?\d+)", done.stderr))
    assert statuses == {"0": "-15", "1": "-9", "2": "-15"}, done.stderr
    assert 'program.py", line' not in done.stderr  # no traceback


def process_of(rank: int) -> ProcessIdentity:
    found = ProcessIdentity.of(parse(current_watch().store.read(f"here/{rank}")))
    assert found is not None
    return found


def terminated(rank: int, world: int, case: str) -> str:
    """After two steps, each rank gets SIGTERM, or all but the last, which has ended in another way."""
    came: list[int] = []
    if case == "an earlier handler":
        signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    trained()
    dist.barrier()
    if case == "a later handler":
        assert signal.signal(signal.SIGTERM, lambda number, frame: came.append(number)) == signal.SIG_DFL
    if case == "killed":  # also after forks
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
    if rank == world - 1:
        if case in ("killed", "a blocked store"):
            killed()
        if case == "failed":
            raise ValueError("out of luck")
        if case == "left":
            return "left"
    elif case in ("killed", "a blocked store", "failed", "left"):
        last = process_of(world - 1)
        while not last.is_gone():
            time.sleep(0.05)
    if case == "a blocked store":
        patch.object(StoreClient, "read", lambda *unused: time.sleep(1000)).start()
    os.kill(os.getpid(), signal.SIGTERM)
    deadline = time.monotonic() + LIMIT / 2
    while not came and time.monotonic() < deadline:
        time.sleep(0.05)
    return f"handled {came}"


@pytest.mark.ranks(2, terminated, of=["case"], timeout=LIMIT)
@pytest.mark.parametrize("case", ["all", "an earlier handler", "a later handler", "killed", "failed", "left"])
def test_the_line_is_printed_if_a_rank_was_lost_and_nobody_handles_sigterm(outcomes: Any, case: str) -> None:
    first, last = outcomes
    handled = "handler" in case
    sentences = re.findall(r"^\[flatfsdp, rank 0\] LostRankError: rank 1 (.*)$", first.output, re.MULTILINE)
    assert first.exit_code == (0 if handled else -signal.SIGTERM), first
    assert first.result == ("handled [15]" if handled else None), first
    if case in ("killed", "failed"):
        (sentence,) = sentences
        assert re.match("was killed, or crashed: process" if case == "killed" else ".*ended with ValueError", sentence)
    else:
        assert not sentences and "LostRankError" not in last.output, outcomes
    if case == "all":
        assert last.exit_code == -signal.SIGTERM, last


@pytest.mark.ranks(2, terminated, "a blocked store", timeout=LIMIT)
def test_a_store_that_does_not_answer_delays_the_end_by_seconds(outcomes: Any) -> None:
    assert outcomes[0].exit_code == -signal.SIGTERM, outcomes[0]
    assert "LostRankError" not in outcomes[0].output


def forked_process_terminated(rank: int, world: int) -> int:
    model = trained()
    child = os.fork()
    if child == 0:
        time.sleep(LIMIT)
        os._exit(0)
    os.kill(child, signal.SIGTERM)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    time.sleep(0.2)  # for what should not happen
    step(model)
    return status


@pytest.mark.ranks(2, forked_process_terminated, timeout=LIMIT)
def test_a_forked_process_ends_alone(outcomes: Any) -> None:
    assert [each.result for each in outcomes] == [-signal.SIGTERM] * 2, outcomes


def broken_in_an_operation_of_the_program(rank: int, world: int) -> None:
    trained()
    dist.barrier()
    if rank == 1:
        killed()
    try:
        dist.all_reduce(torch.ones(4))
    except RuntimeError:
        sys.excepthook(*sys.exc_info())
        os._exit(1)


@pytest.mark.ranks(2, broken_in_an_operation_of_the_program, timeout=LIMIT)
def test_an_error_of_the_backend_that_ends_a_program_is_followed_by_the_line(outcomes: Any) -> None:
    output = outcomes[0].output.splitlines()
    named = [number for number, line in enumerate(output) if "LostRankError: rank 1 was killed" in line]
    assert len(named) == 1 and outcomes[0].exit_code == 1, outcomes[0]
