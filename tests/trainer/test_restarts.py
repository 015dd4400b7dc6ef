"""torchrun starts ranks again when one was killed: the run goes on from its last checkpoint, with as many or fewer."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from flatfsdp.trainer.callbacks import read_metrics
from tests.harness.thorough import is_thorough
from tests.harness.tiny_hub import write_chat, write_llama
from tests.trainer.test_train import environment

pytestmark = pytest.mark.process

STEPS, EVERY = 120, 10
JOB = (
    "-m flatfsdp.train --device cpu --steps {} --minutes 5 --save-every {} --resume latest --output run --sample 0 "
    "--no-progress --no-plot --layers 1 --width 32 --heads 2 --context 16 --batch 2 --eval-batches 2 --seed 1"
)


# Adapters on a small Llama, by a file and by a program; the second keeps the losses, as the command does.
FILE = """
[task]
model = "hf:llama"
train_data = "jsonl:chat.jsonl"
eval_data = "jsonl:chat.jsonl"
[model]
lora = {{ rank = 4, targets = ["q_proj", "down_proj"] }}
[data]
sequence_length = 48
[training]
output = "run"
steps = {}
save_every = {}
lr = 0.01
global_batch = 6
batch = 1
device = "cpu"
progress = false
[fsdp]
keep_frozen_unsharded = true
"""
PROGRAM = """
from flatfsdp.trainer import FSDPArguments, Pretrained, Task, TextData, Trainer, TrainingArguments
from flatfsdp.trainer.callbacks import MetricsLog

chat = TextData("jsonl:chat.jsonl", sequence_length=48)
llama = Pretrained("llama", lora={{"rank": 4, "targets": ["q_proj", "down_proj"]}})
task = Task(model=llama, train_data=chat, eval_data=chat)
given = TrainingArguments(
    output="whole", steps={}, save_every={}, lr=0.01, global_batch=6, batch=1, device="cpu", progress=False
)
Trainer(task, given, FSDPArguments(keep_frozen_unsharded=True), callbacks=[MetricsLog(1)]).train()
"""


@contextmanager
def agent(folder: Path, name: str, *options: str, job: str = JOB) -> Iterator[subprocess.Popen[bytes]]:
    """torchrun with the job, in a session of its own; all of it is over in the end."""
    job = job.format(STEPS, EVERY).split()
    command = [sys.executable, "-m", "torch.distributed.run", "--monitor-interval", "0.2", *options, *job]
    with (folder / name).open("wb") as log:
        process = subprocess.Popen(
            command, cwd=folder, env=environment(), stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            yield process
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill an agent and the ranks that it has started, which are in sessions of their own."""
    with suppress(OSError):
        for pid in (*children(process.pid), process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    process.wait(10)


def children(pid: int) -> list[int]:
    """The processes that `pid` has started."""
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def wait_for(folder: Path, checkpoints: int) -> int:
    """Wait for that many checkpoints; the step of the last."""
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        there = sorted(int(path.name.removeprefix("step-")) for path in (folder / "run").glob("step-????????"))
        if there and there[-1] >= checkpoints * EVERY:
            return there[-1]
        time.sleep(0.05)
    raise AssertionError(f"no checkpoint {checkpoints} in time")


def wait_for_port(port: int) -> None:
    """Wait until a process listens at `port`."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.05)


def check(folder: Path, log: str, *, killed_after: int) -> None:
    """Every step is in the log once, and no more was lost than the steps after the last checkpoint."""
    text = (folder / log).read_text()
    rows = [row for row in read_metrics(folder / "run" / "metrics.jsonl") if "loss" in row]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    resumed = re.findall(r"resuming from run/step-(\d{8})", text)
    assert resumed, text[-2000:]
    assert int(resumed[-1]) >= killed_after


@pytest.mark.skipif(not is_thorough(), reason="takes half a minute: --thorough")
@pytest.mark.parametrize("elastic", ["", " --elastic"])
def test_a_rank_that_is_killed_costs_the_steps_since_the_last_save(elastic: str, tmp_path: Path) -> None:
    """Also where the others could go on: torchrun ends them, and starts all again, which join none of those before."""
    ranks = ("--standalone", "--nproc-per-node=2", "--max-restarts=3")
    with agent(tmp_path, "log", *ranks, job=JOB + elastic) as process:
        saved = wait_for(tmp_path, 2)
        os.kill(children(process.pid)[-1], signal.SIGKILL)
        assert process.wait(120) == 0, (tmp_path / "log").read_text()[-3000:]
    check(tmp_path, "log", killed_after=saved)


@pytest.mark.skipif(not is_thorough(), reason="takes half a minute: --thorough")
def test_a_node_that_is_lost_leaves_fewer_ranks(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    world = ("--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3", "--rdzv-backend=c10d", "--rdzv-id=1")
    # An agent that comes after the last call restarts the other, which torch's agents may fail at: there the second
    # waited for the address of the first, and this one for the second, until both gave up.
    place = (f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-conf=join_timeout=60,last_call_timeout=20")
    with ExitStack() as agents:
        first = agents.enter_context(agent(tmp_path, "first", *world, *place))
        wait_for_port(port)  # the first of them keeps the store
        second = agents.enter_context(agent(tmp_path, "second", *world, *place))
        saved = wait_for(tmp_path, 2)
        _end(second)
        assert first.wait(200) == 0, (tmp_path / "first").read_text()[-3000:]
    check(tmp_path, "first", killed_after=saved)
    assert "1 on cpu" in (tmp_path / "first").read_text()


@pytest.mark.skipif(not is_thorough(), reason="takes a minute: --thorough")
def test_adapters_by_a_file_are_those_of_a_program_though_a_rank_is_killed(tmp_path: Path) -> None:
    pytest.importorskip("transformers", minversion="5")
    pytest.importorskip("peft")
    write_llama(tmp_path / "llama")
    write_chat(tmp_path / "chat.jsonl")
    (tmp_path / "lora.toml").write_text(FILE.format(STEPS, EVERY))
    (tmp_path / "whole.py").write_text(PROGRAM.format(STEPS, EVERY))
    ranks = ("--standalone", "--nproc-per-node=2")
    with agent(tmp_path, "whole.log", *ranks, job="whole.py") as process:
        assert process.wait(120) == 0, (tmp_path / "whole.log").read_text()[-3000:]
    by_file = "-m flatfsdp.train --config lora.toml --resume latest"
    with agent(tmp_path, "log", *ranks, "--max-restarts=3", job=by_file) as process:
        saved = wait_for(tmp_path, 2)
        os.kill(children(process.pid)[-1], signal.SIGKILL)
        assert process.wait(120) == 0, (tmp_path / "log").read_text()[-3000:]
    check(tmp_path, "log", killed_after=saved)
    whole, run = (
        [(row["step"], row["loss"]) for row in read_metrics(tmp_path / folder / "metrics.jsonl") if "loss" in row]
        for folder in ("whole", "run")
    )
    assert run == whole
