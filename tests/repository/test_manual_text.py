"""Properties of the manual that need no run: links, names, numbers, marks, and the length of README."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import flatfsdp
import flatfsdp.checkpoint
import flatfsdp.comm_hooks
import flatfsdp.errors
import flatfsdp.trainer
import flatfsdp.wrap
from tests.harness import manual

pytestmark = pytest.mark.unit

ROOT = manual.ROOT
README = ROOT / "README.md"
WHOLE = (flatfsdp.wrap, flatfsdp.comm_hooks, flatfsdp.errors)  # modules of which a page has all
NAMED = (flatfsdp, flatfsdp.checkpoint, flatfsdp.trainer)  # and those whose names it lists
# Languages that do not run.
QUIET = {"text", "output", "toml", "console", "diff", "{toctree}", "{eval-rst}", "{include}"}
MARK = re.compile(r"not run: \w.{10,}|run by: tests/[\w/]+\.py|thorough|file: [\w.]+|within: [\d.]+")
pages = pytest.mark.parametrize("page", manual.PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())


def without_code(page: Path) -> str:
    return re.sub(r"^( *)```.*?^\1```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The names of a page's headings, as Sphinx and the usual viewers make them."""
    headings = re.findall(r"^#+ (.*)$", without_code(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}


@pages
def test_links_lead_somewhere(page: Path) -> None:
    text, lost = without_code(page), []
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", text):
        path = (page.parent / target).resolve() if target else page
        if not path.exists() or (anchor and anchor not in anchors(path)):
            lost.append(f"{target}#{anchor}")
    assert not lost


@pages
def test_blocks_run_or_give_the_reason(page: Path) -> None:
    for block in manual.blocks(page):
        where = f"{page.name}:{block.line}"
        assert block.language in {*manual.RUN, *QUIET}, f"{where}: the language {block.language!r}"
        marked = MARK.fullmatch(block.mark)
        if block.language == "sh":
            assert marked, f"{where}: a command runs with --thorough, in a test, or not for a reason"
            if shutil.which("bash"):
                done = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True, timeout=60)
                assert not done.stderr, f"{where}: {done.stderr}"
        if block.language == "python":
            ast.parse(block.text)
            assert not block.mark or (marked and block.mark != "thorough"), f"{where}: {block.mark}"
        if block.mark.startswith("run by: "):
            assert (ROOT / block.mark.removeprefix("run by: ")).is_file(), where


def test_numbers_of_a_page_are_those_of_any_processor() -> None:
    page = README
    exact = manual.Block(1, "output", "a  loss 0.1898\nof (3, 4)\n", "")
    close = manual.Block(1, "output", "a  loss 0.1898\n... of (3, 4), 2.5 GiB\n", "within: 0.001")
    assert not manual.differs(page, "a loss 0.1898\nof (3, 4)\n", [exact])
    assert manual.differs(page, "a loss 0.1899\nof (3, 4)\n", [exact])
    for printed in ("a loss 0.1907\nmore of (3, 4), 2.5 GiB", "a loss 0.1898\nmore\nof (3, 4), 2.4999 GiB\n"):
        assert not manual.differs(page, printed, [close])
        assert not manual.differs(page, f"a loss 0.1898\nof (3, 4)\n{printed}", [exact, close])
    for printed in ("a loss 0.1909\nof (3, 4), 2.5 GiB", "a loss nan\nof (3, 4), 2.5 GiB", "a loss 0.1898\nof (3, 5)"):
        assert manual.differs(page, printed, [close])


@pages
def test_names_exist(page: Path) -> None:
    """Of flatfsdp in running text and imports, and of files of the repository."""
    text = page.read_text()
    for name in {each.rstrip(".") for each in re.findall(r"\bflatfsdp\.(?!json\b)[A-Za-z_][\w.]*", without_code(page))}:
        assert resolves(name), name
    for block in manual.blocks(page):
        if block.language == "python":
            for node in ast.walk(ast.parse(block.text)):
                if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "flatfsdp":
                    for alias in node.names:
                        assert resolves(f"{node.module}.{alias.name}"), f"{page.name}:{block.line}: {alias.name}"
    for path in re.findall(r"`((?:tools|tests|flatfsdp|docs)/[\w./-]+)`", text):
        assert (ROOT / path).exists(), path


def resolves(name: str) -> bool:
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


@pages
def test_numbers_of_a_table_are_in_the_file_that_it_names(page: Path) -> None:
    found = re.findall(r"^<!-- numbers of: ([\w./]+) -->\n((?:\|.*\n)+)", page.read_text(), flags=re.MULTILINE)
    for name, table in found:
        measured = set(re.findall(r"[\d.,]*\d", (ROOT / "tools" / "bench_results" / name).read_text()))
        cells = re.sub(r"`[^`]*`|FSDP\d|mlp8x|\d+ (?:ranks|tensors)|\d x \d", "", table)
        assert not set(re.findall(r"[\d.,]*\d", cells)) - measured - {"1"}, name  # ratios are to 1


def test_readme_is_short_and_begins_with_what_it_is() -> None:
    text = README.read_text()
    assert text.count("\n") <= 150
    assert len(text.split("\n\n")[1].splitlines()) <= 5
    (program, *_) = (each.text for each in manual.blocks(README) if each.language == "python")
    assert len(program.splitlines()) <= 15


def test_the_reference_has_every_public_name() -> None:
    text = "\n".join(page.read_text() for page in sorted((ROOT / "docs" / "reference").glob("*.md")))
    listed = set(re.findall(r"^\.\. auto(?:class|function):: (\w+)$", text, flags=re.MULTILINE))
    assert all(f".. automodule:: {each.__name__}\n" in text for each in WHOLE)
    assert {f"{each.__name__}.{name}" for each in NAMED for name in each.__all__ if name not in listed} == set()


def test_the_manual_has_something_on_every_argument_of_fsdp1() -> None:
    table = (ROOT / "docs/migration/fsdp1.md").read_text()
    named = re.findall(r"`(\w+)`", "".join(row.split("|")[1] for row in table.splitlines() if row.startswith("| `")))
    assert sorted(named) == sorted(inspect.signature(flatfsdp.FullyShardedDataParallel).parameters)
