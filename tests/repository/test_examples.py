"""Every example runs as it stands and prints the expected output."""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path

import pytest

import flatfsdp.examples
from tests.harness import commands, fresh, manual

pytestmark = pytest.mark.process

FOLDER = Path(flatfsdp.examples.__file__).parent
ROOT = FOLDER.parents[1]
AFTER, BEFORE, LORA = FOLDER / "from_fsdp1.py", FOLDER / "from_fsdp1.before.txt", FOLDER / "lora.py"
RESUME, PLAIN = FOLDER / "resume.py", FOLDER / "plain_loop.py"
TIMEOUT = 240  # seconds


def start(*arguments: str) -> str:
    """Run this python with `arguments`, outside of the test's own world; its output."""
    clean = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    clean |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), clean.get("PYTHONPATH", "")])}
    done = commands.run(*arguments, folder=Path.cwd(), environment=clean, limit=TIMEOUT)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, list[str]]:
    """The output of each of two ranks, by program; the same two processes run all programs."""
    folder = tmp_path_factory.mktemp("programs")
    copies = {folder / "again.py": RESUME, folder / "before.py": BEFORE}
    copies |= {folder / path.name: path for path in (LORA, AFTER, RESUME, PLAIN)}
    for copy, original in copies.items():
        copy.write_text(original.read_text())
    order = [LORA, AFTER, BEFORE, RESUME, folder / "again.py", PLAIN]
    places = {original: copy for copy, original in copies.items() if copy.name != "again.py"}
    programs = [str(places.get(path, path)) for path in order]
    ranks = fresh.run(2, manual.run_in_turn, programs, timeout=TIMEOUT)
    assert [rank.exit_code for rank in ranks] == [0, 0], "\n".join(f"{rank.output}\n{rank.error}" for rank in ranks)
    return dict(zip(order, map(list, zip(*(rank.result for rank in ranks), strict=True)), strict=True))


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


def test_every_example_is_short_and_tried_here() -> None:
    programs = {path.name for path in FOLDER.iterdir() if path.is_file()} - {"__init__.py"}
    assert programs == {
        "plain_loop.py",
        "single_process.py",
        "lora.py",
        "from_fsdp1.py",
        "from_fsdp1.before.txt",
        "resume.py",
        "own_model.py",  # by the commands of the manual, in test_train.py
    }
    assert [name for name in programs if len((FOLDER / name).read_text().splitlines()) >= 60] == []
