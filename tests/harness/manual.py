"""The pages of the manual, README among them, as programs: their blocks of code, and the expected output.

A page's blocks of Python are one program, on two ranks; its blocks of output are rank 0's output, with `...` for parts
that differ between runs. Results of long sums differ between processors: a block that prints one has a tolerance.
Comments of HTML, which readers do not see, add:

    <!-- ranks: 4 -->            the number of ranks
    <!-- continues: PAGE -->     run after the blocks of that page, in the same folder
    <!-- needs: MODULE, ... -->  run only where these are installed
    <!-- setup                   lines of Python before the next block
    -->
    <!-- not run: REASON -->     before a block: only its syntax and its names are checked
    <!-- run by: TEST -->        before a block: that test runs it
    <!-- thorough -->            before a block of a shell: run with --thorough; a block of output right after it is
                                 the output of its last command
    <!-- within: 0.01 -->        before a block of output: its numbers with a point may be off by as much
    <!-- file: NAME -->          before a block: the reader saves it as that file, for the commands of the page
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from unittest.mock import patch

import torch.distributed as dist

from flatfsdp.errors import FlatFSDPWarning

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
RUN = ("python", "sh")  # languages of blocks that run
_BLOCK = re.compile(
    r"^(?:<!-- (?P<mark>[^\n]*) -->\n)?```(?P<language>[\w{}-]*)\n(?P<text>.*?)^```$|^<!-- setup\n(?P<setup>.*?)^-->$",
    flags=re.MULTILINE | re.DOTALL,
)
_NUMBER = re.compile(r"\d+\.\d+")
_PARTS = re.compile(r"(\.\.\.|\d+\.\d+|\s+)")
_SAVED = r"[Ss]ave (?:it|this|what follows) as `([\w.]+\.py)`"


@dataclass(frozen=True)
class Block:
    """One fenced block, or a comment with lines before the next one (its language is "python")."""

    line: int
    language: str
    text: str
    mark: str  # the content of the comment before it

    @property
    def runs(self) -> bool:
        """Whether it belongs to the program of its page."""
        return not self.mark.startswith(("not run: ", "run by: ", "file: "))

    @property
    def tolerance(self) -> float | None:
        """By how much its numbers may be off."""
        return float(self.mark.removeprefix("within: ")) if self.mark.startswith("within: ") else None


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    return [
        Block(
            text.count("\n", 0, found.start()) + 1,
            "python" if found["setup"] else found["language"],
            found["setup"] or found["text"],
            found["mark"] or "",
        )
        for found in _BLOCK.finditer(text)
    ]


def read(page: Path, what: str) -> list[str]:
    """The items of the page's comment `what`."""
    found = re.findall(rf"^<!-- {what}: (.*) -->$", page.read_text(), flags=re.MULTILINE)
    return [each.strip() for line in found for each in line.split(",")]


def program(page: Path) -> str:
    """The page's blocks of Python, or "" where it has none of its own."""
    own = [each.text for each in blocks(page) if each.language == "python" and each.runs]
    before = [program(page.parent / other) for other in read(page, "continues")]
    return "\n".join([*before, *own]) if own else ""


def files(page: Path) -> dict[str, str]:
    """The files that readers save for the commands of the page: texts by the names of files."""
    own = {name: program(page) for name in re.findall(_SAVED, page.read_text())}
    marked = [each for each in blocks(page) if each.mark.startswith("file: ")]
    return own | {each.mark.removeprefix("file: "): each.text for each in marked}


def commands(page: Path) -> list[tuple[Block, Block | None]]:
    """The blocks of a shell that run with --thorough, each with the block of its output, None where there is none."""
    found = blocks(page)
    return [
        (block, after if after is not None and after.language == "output" else None)
        for block, after in zip_longest(found, found[1:])
        if block.mark == "thorough"
    ]


def promised(page: Path) -> list[Block]:
    """The expected output of the page's program."""
    of_commands = [output for _, output in commands(page)]
    return [each for each in blocks(page) if each.language == "output" and each not in of_commands]


def differs(page: Path, printed: str, expected: Sequence[Block] | None = None) -> str:
    """The difference of a printed text from the page's output, by default its program's; "" if there is none."""
    shown = promised(page) if expected is None else expected
    pattern, bounds = "", []
    for block in shown:
        for part in _PARTS.split(block.text):
            if part == "...":
                pattern += ".*?"
            elif part.isspace():
                pattern += r"\s+"
            elif block.tolerance is not None and _NUMBER.fullmatch(part):
                pattern += f"({_NUMBER.pattern})"
                bounds.append((float(part), block.tolerance))
            else:
                pattern += re.escape(part)
    found = re.fullmatch(rf"\s*{pattern}\s*", f"{printed}\n", flags=re.DOTALL)
    close = found is not None and all(
        abs(float(number) - value) <= tolerance
        for number, (value, tolerance) in zip(found.groups(), bounds, strict=True)
    )
    text = "".join(each.text for each in shown)
    return "" if close else f"{page.relative_to(ROOT)} promises\n{text}\nand prints\n{printed}"


def run_in_turn(rank: int, world: int, programs: list[str]) -> list[str]:
    """Run programs that each make and destroy a process group, on this rank, each in its own folder. Returned: their
    output."""
    outputs = []
    shared = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
    for each in programs:
        os.chdir(Path(each).parent)
        # Each sees only the keys of its own group, like under torchrun with a separate store.
        join = partial(dist.init_process_group, store=dist.PrefixStore(each, shared), rank=rank, world_size=world)
        with (
            contextlib.redirect_stdout(io.StringIO()) as printed,
            patch.object(dist, "init_process_group", join),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("error", FlatFSDPWarning)
            runpy.run_path(each, run_name="__main__")
        if dist.is_initialized():
            dist.destroy_process_group()
        outputs.append(printed.getvalue())
    return outputs
