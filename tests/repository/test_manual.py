"""Every block of code of the manual runs as it stands, and prints the output that the page shows below it."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.harness import fresh, manual
from tests.harness.thorough import is_thorough

pytestmark = pytest.mark.process

TIMEOUT = 240  # seconds
PROGRAMS = [page for page in manual.PAGES if manual.program(page)]
WORLDS = {page: int(*manual.read(page, "ranks") or [2]) for page in PROGRAMS}
COMMANDS = [page for page in manual.PAGES if manual.commands(page)]


def name_of(page: Path) -> str:
    return page.relative_to(manual.ROOT).as_posix()


def lacks(page: Path) -> list[str]:
    return [module for module in manual.read(page, "needs") if find_spec(module) is None]


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[Path, str]:
    """The output of rank 0 for each page of the selected tests; pages take turns in the same processes."""
    chosen = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    selected = {each["page"] for each in chosen if "page" in each}
    found: dict[Path, str] = {}
    for world in sorted(set(WORLDS.values())):
        pages = [page for page in PROGRAMS if WORLDS[page] == world and page in selected and not lacks(page)]
        paths = []
        for page in pages:
            folder = tmp_path_factory.mktemp(page.stem)
            paths.append(folder / f"{page.stem}.py")
            paths[-1].write_text(manual.program(page))
        if pages:
            ranks = fresh.run(world, manual.run_in_turn, [*map(str, paths)], timeout=TIMEOUT)
            # Also that of a rank which has only ended because another had, or the cause of a rare failure is not known.
            trouble = "\n".join(f"{rank.output[:3000]}\n{rank.error}" for rank in ranks)
            assert [rank.exit_code for rank in ranks] == [0] * world, trouble
            found |= dict(zip(pages, ranks[0].result, strict=True))
    return found


@pytest.mark.parametrize("page", PROGRAMS, ids=name_of)
def test_the_blocks_of_a_page_run_from_top_to_bottom(page: Path, printed: dict[Path, str]) -> None:
    if lacks(page):
        pytest.skip(f"needs {', '.join(lacks(page))}")
    assert not manual.differs(page, printed[page])


def test_torch_alone_is_enough(tmp_path: Path) -> None:
    """The package requires torch alone: README's program, checkpoints and exports run without NumPy and the extras."""
    absent = "numpy", "pydantic", "safetensors", "tqdm", "matplotlib"
    programs = []
    for name in ("README.md", "docs/how_to/checkpoints.md", "docs/tutorials/resume.md"):
        programs.append(tmp_path / f"{Path(name).stem}.py")
        programs[-1].write_text(manual.program(manual.ROOT / name))
    program = f"""if True:
        import runpy, sys
        sys.modules.update(dict.fromkeys({absent}))
        import torch
        for each in {[*map(str, programs)]}:
            runpy.run_path(each, run_name="__main__")
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
        torch.distributed.init_process_group("gloo")
        # A checkpoint of several ranks needs these.
        from flatfsdp import messages
        assert messages.gather({{"a": 1}}, torch.distributed.group.WORLD, call="called this") == [{{"a": 1}}]
    """
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    environment = {**os.environ, **alone, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(manual.ROOT)}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not is_thorough(), reason="starts interpreters")
@pytest.mark.parametrize("page", COMMANDS, ids=name_of)
def test_the_commands_of_a_page_run(page: Path, tmp_path: Path) -> None:
    if lacks(page):
        pytest.skip(f"needs {', '.join(lacks(page))}")
    for name, text in manual.files(page).items():
        (tmp_path / name).write_text(text)
    places = {"PYTHONPATH": os.pathsep.join([str(manual.ROOT), os.environ.get("PYTHONPATH", "")])}
    environment = {**os.environ, **places, "OMP_NUM_THREADS": "1", "FLATFSDP_CACHE": str(tmp_path / "cache")}
    starts = {"python": [], "torchrun": ["-m", "torch.distributed.run", "--standalone"]}
    for block, shown in manual.commands(page):
        for line in block.text.replace("\\\n", " ").splitlines():
            first, *arguments = shlex.split(line, comments=True)
            command = [sys.executable, *starts[first], *arguments]
            done = subprocess.run(
                command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=TIMEOUT
            )
            assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        assert shown is None or not manual.differs(page, done.stdout, [shown])
