"""The commands of the manual for several nodes, each node an agent of torchrun on this machine."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from flatfsdp.trainer.callbacks import read_metrics
from tests.harness import manual
from tests.harness.thorough import is_thorough
from tests.trainer.test_train import environment, facts

pytestmark = pytest.mark.process

PAGE = manual.ROOT / "docs/how_to/multi_node.md"
RUN = """
[training]
steps = 4
device = "cpu"
progress = false
plot = false
output = "run"
[demo]
text = "text.txt"
layers = 1
width = 16
heads = 2
context = 32
sample = 0
"""
# The environment of a cluster of two nodes, which are both this machine.
STUBS = {
    "torchrun": f'exec {sys.executable} -m torch.distributed.run "$@"',
    "scontrol": 'test "$*" = "show hostnames node[1-2]" && printf "127.0.0.1\\nnode2\\n"',
    "srun": """while [[ "$1" == --* ]]; do shift; done
"$@" & first=$!
"$@" & second=$!
wait $first && wait $second""",
}


def script(first: str) -> str:
    """The block of the page that begins so, with one rank on each node, and a port that is free."""
    (found,) = (each.text for each in manual.blocks(PAGE) if each.text.startswith(first))
    assert "--nproc-per-node=8" in found and ":29500" in found
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    return found.replace("--nproc-per-node=8", "--nproc-per-node=1").replace(":29500", f":{port}")


def start(text: str, folder: Path, **variables: str) -> subprocess.Popen[str]:
    commands = folder / "commands"
    commands.mkdir(exist_ok=True)
    for name, body in STUBS.items():
        (commands / name).write_text(f"#!/bin/bash\n{body}\n")
        (commands / name).chmod(0o755)
    variables |= {"PATH": f"{commands}{os.pathsep}{os.environ['PATH']}"}
    return subprocess.Popen(
        ["bash", "-c", text], cwd=folder, env=environment() | variables, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


@pytest.fixture(autouse=True)
def can_run() -> None:
    if not is_thorough() or shutil.which("bash") is None:
        pytest.skip("starts agents of torchrun: --thorough")


def test_the_same_command_on_each_node(tmp_path: Path) -> None:
    text = script("torchrun --nnodes=2")
    (tmp_path / "program.py").write_text(manual.program(manual.ROOT / "README.md"))
    nodes = [start(text, tmp_path, MASTER_ADDR="127.0.0.1") for _ in range(2)]
    printed = [node.communicate(timeout=200)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], printed
    assert all("ranks 2 x 1: 2 shards on ranks 0-1" in each for each in printed)


def test_the_script_for_slurm(tmp_path: Path) -> None:
    text = script("#!/bin/bash")
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog.\n" * 400)
    (tmp_path / "run.toml").write_text(RUN)
    job = start(text, tmp_path, SLURM_JOB_NODELIST="node[1-2]", SLURM_NNODES="2", SLURM_JOB_ID="17")
    printed, _ = job.communicate(timeout=200)
    assert job.returncode == 0, printed
    assert printed.count("summary\n") == 1 and facts(printed)["ranks"].startswith("2 on cpu")
    assert [row["step"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in row] == [1, 2, 3, 4]
