"""Every example, and the README, runs as it stands and says what it should."""

from __future__ import annotations

import contextlib
import difflib
import io
import os
import re
import runpy
import warnings
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch.distributed as dist

import flatfsdp.examples
from flatfsdp.errors import FlatFSDPWarning
from tests.harness import commands, fresh

FOLDER = Path(flatfsdp.examples.__file__).parent
ROOT = FOLDER.parents[1]
AFTER, BEFORE, LORA = FOLDER / "from_fsdp1.py", FOLDER / "from_fsdp1.before.txt", FOLDER / "lora.py"
RESUME, PLAIN = FOLDER / "resume.py", FOLDER / "plain_loop.py"
TIMEOUT = 240  # seconds


def start(*arguments: str) -> str:
    """Run this python with `arguments`, outside of any world of the test's own; what it printed."""
    clean = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    clean |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), clean.get("PYTHONPATH", "")])}
    done = commands.run(*arguments, folder=ROOT, environment=clean, limit=TIMEOUT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_in_turn(rank: int, world: int, programs: list[str]) -> list[str]:
    """Run programs that each make and destroy a process group, on this rank; what each printed."""
    outputs = []
    os.chdir(Path(programs[1]).parent)  # where programs may leave files
    shared = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
    for program in programs:
        # Each finds the keys of its own group only: under torchrun it would have a store to itself.
        join = partial(dist.init_process_group, store=dist.PrefixStore(program, shared), rank=rank, world_size=world)
        with (
            contextlib.redirect_stdout(io.StringIO()) as printed,
            patch.object(dist, "init_process_group", join),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("error", FlatFSDPWarning)
            runpy.run_path(program, run_name="__main__")
        if dist.is_initialized():
            dist.destroy_process_group()
        outputs.append(printed.getvalue())
    return outputs


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, list[str]]:
    """What each of two ranks printed in each program, all run by the same two processes."""
    folder = tmp_path_factory.mktemp("programs")
    readme, before, again = folder / "readme.py", folder / "before.py", folder / "again.py"
    again.write_text(RESUME.read_text())
    readme.write_text("\n".join(blocks("python")))
    before.write_text(BEFORE.read_text())
    programs = [*map(str, (LORA, readme, AFTER, before, RESUME, again, PLAIN))]
    ranks = fresh.run(2, run_in_turn, programs, timeout=TIMEOUT)
    assert [rank.exit_code for rank in ranks] == [0, 0], "\n".join(f"{rank.output}\n{rank.error}" for rank in ranks)
    by_program = map(list, zip(*(rank.result for rank in ranks), strict=True))
    return dict(zip((LORA, ROOT / "README.md", AFTER, BEFORE, RESUME, again, PLAIN), by_program, strict=True))


def blocks(language: str) -> list[str]:
    """The fenced blocks of README.md in `language`."""
    return re.findall(rf"^```{language}\n(.*?)^```$", (ROOT / "README.md").read_text(), flags=re.MULTILINE | re.DOTALL)


def losses(text: str) -> list[float]:
    return [float(found) for found in re.findall(r"loss (\d+\.\d+)", text)]


def test_a_plain_loop_learns(printed: dict[Path, list[str]]) -> None:
    text = printed[PLAIN][0]
    assert "3 units                  17,025      34,052        1\nranks 2 x 1: 2 shards on ranks 0-1\n" in text
    assert losses(text)[0] > 0.5
    assert losses(text)[-1] < 0.1


def test_a_single_process_needs_no_launcher() -> None:
    assert start("-m", "flatfsdp.examples.single_process") == "y = 2.00 x + 1.00\n"


def test_lora_keeps_gradients_of_the_additions_only(printed: dict[Path, list[str]]) -> None:
    text, silent = printed[LORA]
    # Rank 0's half of the three adapters, 4 wide: between 8 and 256, 256 and 256, 256 and 1.
    additions = 4 * (8 + 256) + 4 * (256 + 256) + 4 * (256 + 1)
    assert re.findall(r"([\d,]+) bytes of gradients", text) == [f"{additions * 4 // 2:,}"] * 3
    assert text.count("float32 frozen, float32") == 3
    assert losses(text)[-1] < losses(text)[0]
    assert silent == ""


def test_a_program_for_fsdp1_moves_by_its_imports(printed: dict[Path, list[str]]) -> None:
    lines = difflib.ndiff(BEFORE.read_text().splitlines(), AFTER.read_text().splitlines())
    assert sorted(line for line in lines if line[0] in "+-") == [
        "+ from flatfsdp import BackwardPrefetch, MixedPrecision, ShardingStrategy",
        "+ from flatfsdp import FullyShardedDataParallel as FSDP",
        "+ from flatfsdp.wrap import transformer_auto_wrap_policy",
        "- from torch.distributed.fsdp import BackwardPrefetch, MixedPrecision, ShardingStrategy",
        "- from torch.distributed.fsdp import FullyShardedDataParallel as FSDP",
        "- from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy",
    ]
    numbers = [[float(number) for number in re.findall(r"\d+\.\d+", printed[path][0])] for path in (AFTER, BEFORE)]
    assert len(numbers[0]) == 10  # loss and norm of five steps
    assert numbers[0] == pytest.approx(numbers[1], abs=2e-4)


def test_a_second_run_goes_on_where_the_first_ended(printed: dict[Path, list[str]]) -> None:
    again = next(path for path in printed if path.name == "again.py")
    assert re.findall(r"\w+ after step \d+", printed[RESUME][0]) == ["saved after step 50"]
    assert re.findall(r"\w+ after step \d+", printed[again][0]) == ["resumed after step 50", "saved after step 100"]
    assert losses(printed[again][0]) < losses(printed[RESUME][0])


def test_the_readme_runs_from_top_to_bottom_and_prints_what_it_shows(printed: dict[Path, list[str]]) -> None:
    shown = [re.subn(r"^step \d: loss \d\.\d{3}\n", "", text, flags=re.M) for text in printed[ROOT / "README.md"]]
    assert [[text] for text, _ in shown] == [blocks("text")] * 2
    assert [count for _, count in shown] == [3, 3], "the first program shows what it does"


def test_the_first_program_of_the_readme_has_twelve_lines() -> None:
    assert len([line for line in blocks("python")[0].splitlines() if line]) == 12


def test_every_example_is_short_and_tried_here() -> None:
    programs = {path.name for path in FOLDER.iterdir() if path.is_file()} - {"__init__.py"}
    assert programs == {
        "plain_loop.py",
        "single_process.py",
        "lora.py",
        "from_fsdp1.py",
        "from_fsdp1.before.txt",
        "resume.py",
        "own_model.py",  # by the commands of the README, in test_train.py
    }
    assert [name for name in programs if len((FOLDER / name).read_text().splitlines()) >= 60] == []
