"""Pages of docs/internals about the engine's inside are those of the code as it is.

Parts that `tools/internals.py` makes are rewritten by one command, which a failing test prints. Other tables are
compared with the code here.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flatfsdp.engine.agreement.collective_calls import come, erase
from flatfsdp.engine.guards import optimizer_hooks
from flatfsdp.engine.watchdog.store import StoreClient
from tests.golden import programs
from tests.harness.thorough import is_thorough
from tools import internals

pytestmark = pytest.mark.single_process

ENGINE = internals.PACKAGE / "engine"
REMEDY = "the code has changed: run `.venv/bin/python -m tools.internals`, and read what it prints"
CONSTRAINTS = (internals.ROOT / "tools" / "constraints.txt").read_text()
PAGES = sorted(internals.PAGES.glob("*.md"))
parts = [(page, name) for page in PAGES for _, name, _ in internals.PART.findall(page.read_text())]


@pytest.fixture(autouse=True, scope="module")
def nothing_left() -> None:
    """Models of earlier tests look at no optimizer of these."""
    optimizer_hooks.looking.clear()


@pytest.mark.skipif(f"torch=={torch.__version__.partition('+')[0]}\n" not in CONSTRAINTS, reason="of another torch")
@pytest.mark.parametrize(("page", "name"), parts, ids=lambda each: each.stem if isinstance(each, Path) else each)
def test_a_part_is_what_the_tool_makes(page: Path, name: str) -> None:
    assert f"\n{internals.PARTS[name]()}\n" in page.read_text(), f"{page.name}, {name}: {REMEDY}"


def test_every_part_has_a_page() -> None:
    assert sorted(name for _, name in parts) == sorted(internals.PARTS)


def test_pages_name_files_that_are_there() -> None:
    """By their paths in the engine, or in the package."""
    for page in PAGES:
        named = re.findall(r"`([a-z_]+/[\w/]+\.py)`", page.read_text())
        roots = (ENGINE, internals.PACKAGE, internals.ROOT)
        gone = {each for each in named if not any((root / each).exists() for root in roots)}
        assert not gone, f"{page.name} names {sorted(gone)}"


def test_pages_name_functions_that_are_there() -> None:
    """`Class.member`, `Class`, `function` and `CONSTANT` of the engine, in what was not made by the tool."""
    members: dict[str, set[str]] = {}
    names = set()
    for path in internals.PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                text = ast.unparse(node)
                of = set(re.findall(r"(?:\bself\.|\bdef |^    )(\w+)(?=\(|: | = )", text, re.MULTILINE))
                members.setdefault(node.name, set()).update(of)
            names |= {getattr(node, kind, None) for kind in ("name", "id", "attr")}
    found = 0
    for page in ("where.md", "states.md"):
        text = internals.PART.sub("", (internals.PAGES / page).read_text())
        for name in re.findall(r"`([A-Za-z_]\w*(?:\.\w+)?)(?:\(\))?`", text):
            if name.endswith(".py") or name.startswith(("torch.", "model.")):
                continue
            first, _, member = name.partition(".")
            assert first in names, f"{page} names `{name}`"
            assert not member or member in members.get(first, ()), f"{page} names `{name}`"
            found += 1
    assert found > 20, "the test sees hardly any name: it shows nothing"


# --- the keys in the store --------------------------------------------------------------------------------------------

WRITES, READS, ERASES = "written by", "read by", "erased by"
METHODS = {
    "post": WRITES,
    "append": WRITES,
    "set_if_absent": WRITES,
    "count": WRITES,
    "compare_set": WRITES,
    "read": READS,
    "erase": ERASES,
}
CONSTANTS = {"START": "start"}


@lru_cache
def keys_in_code() -> list[tuple[str, str, re.Pattern[str]]]:
    """(file, what it does, pattern of the keys) for every request whose key has a literal part."""
    return [*_keys_in_code()]


def _keys_in_code() -> Iterator[tuple[str, str, re.Pattern[str]]]:
    for path in sorted(ENGINE.rglob("*.py")):
        tree = ast.parse(path.read_text())
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef):
                for kind, given in requests_in(function):
                    for key in keys_of(given, function, tree):
                        if re.search(r"\w", key.replace(".+", "")):
                            yield path.relative_to(ENGINE).as_posix(), kind, re.compile(key)


def requests_in(function: ast.FunctionDef) -> Iterator[tuple[str, ast.expr]]:
    """What each request of a function does, and its argument for the key."""
    for call in ast.walk(function):
        if not isinstance(call, ast.Call):
            continue
        called, given = call.func, call.args
        if ast.unparse(called).endswith("partial") and given:  # a request that is made later
            called, given = given[0], given[1:]
        if not (isinstance(called, ast.Attribute) and called.attr in METHODS and given):
            continue
        if not re.search(r"store$|notes$|^self$", ast.unparse(called.value)):
            continue
        kind = METHODS[called.attr]
        if called.attr == "count" and [ast.unparse(each) for each in given[1:]] == ["0"]:
            kind = READS
        for each in given if kind is ERASES else given[:1]:
            yield kind, each


@lru_cache
def makers_of_keys() -> dict[str, str]:
    """Functions of modules that only make a key of their arguments: regular expressions for it."""
    return {
        made.name: "".join(
            re.escape(each.value) if isinstance(each, ast.Constant) else ".+" for each in of.value.values
        )
        for path in sorted((ENGINE / "agreement").rglob("*.py"))
        for made in ast.parse(path.read_text()).body
        if isinstance(made, ast.FunctionDef)
        if isinstance(of := made.body[-1], ast.Return) and isinstance(of.value, ast.JoinedStr)
    }


def keys_of(given: ast.expr, function: ast.FunctionDef, tree: ast.Module) -> Iterator[str]:
    """Regular expressions for the keys that an argument may be, as far as they are literal."""
    if isinstance(given, ast.Name):
        known = [*assigned(given.id, function)]
        yield from (key for value in known for key in keys_of(value, function, tree))
        if not known:
            yield CONSTANTS.get(given.id, ".+")
    elif isinstance(given, ast.Call) and re.fullmatch(r"self\.\w+", ast.unparse(given.func)):
        for other in ast.walk(tree):
            if isinstance(other, ast.FunctionDef) and f"self.{other.name}" == ast.unparse(given.func):
                for each in ast.walk(other):
                    if isinstance(each, ast.Return) and isinstance(each.value, ast.JoinedStr):
                        yield from keys_of(each.value, other, tree)
    elif isinstance(given, ast.Call) and isinstance(given.func, ast.Name) and given.func.id in makers_of_keys():
        yield makers_of_keys()[given.func.id]
    elif isinstance(given, ast.Starred):
        yield from keys_of(given.value, function, tree)
    elif isinstance(given, ast.GeneratorExp):
        yield from keys_of(given.elt, function, tree)
    elif isinstance(given, ast.JoinedStr):
        pieces = [
            [re.escape(str(each.value))]
            if isinstance(each, ast.Constant)
            else [*keys_of(each.value, function, tree)]
            if isinstance(each, ast.FormattedValue) and isinstance(each.value, ast.Name)
            else [".+"]
            for each in given.values
        ]
        yield from ("".join(each) for each in product(*pieces))
    elif isinstance(given, ast.Constant):
        yield re.escape(str(given.value))
    else:
        yield ".+"


def assigned(name: str, function: ast.FunctionDef) -> Iterator[ast.JoinedStr]:
    """The strings with literal parts that a function assigns to a name."""
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            target, value = node.targets[0], node.value
            pairs = [(target, value)]
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                pairs = [*zip(target.elts, value.elts, strict=True)]
            for one, found in pairs:
                if isinstance(one, ast.Name) and one.id == name and isinstance(found, ast.JoinedStr):
                    yield found


def table_of_keys() -> list[tuple[list[str], dict[str, set[str]]]]:
    """The rows of the page: keys, and the files in each column."""
    rows = []
    for line in (internals.PAGES / "store.md").read_text().splitlines():
        cells = [each.strip() for each in line.strip("|").split("|")]
        if len(cells) == 6 and cells[0].startswith("`"):
            columns = {
                name: set(re.findall(r"`([\w/]+\.py)`", cell))
                for name, cell in zip((WRITES, READS, ERASES), cells[1:4], strict=True)
            }
            rows.append((re.findall(r"`([^`]+)`", cells[0]), columns))
    return rows


def test_the_table_of_keys_has_every_request() -> None:
    found, rows = keys_in_code(), table_of_keys()
    assert len(found) > 40 and len(rows) > 15, "the test sees hardly any request: it shows nothing"
    for file, kind, pattern in found:
        of = [columns[kind] for keys, columns in rows if any(pattern.fullmatch(key) for key in keys)]
        assert any(file in files for files in of), f"store.md: {pattern.pattern} is {kind} {file}"


def test_the_table_of_keys_has_no_other_request() -> None:
    found = keys_in_code()
    for keys, columns in table_of_keys():
        for kind, files in columns.items():
            for file in files:
                seen = [each for each in found if each[0] == file and each[1] == kind]
                known = any(pattern.fullmatch(key) for _, _, pattern in seen for key in keys)
                assert known, f"store.md: {', '.join(keys)}, {kind} {file}"


def test_requests_cost_what_the_page_states(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = 0
    request = StoreClient.__dict__["_request"]

    @contextmanager
    def counted(notes: StoreClient) -> Iterator[Any]:
        nonlocal sent
        sent += 1
        with request(notes) as store:
            yield store

    monkeypatch.setattr(StoreClient, "_request", counted)
    notes = StoreClient(dist.HashStore())

    def cost(action: Callable[[], Any]) -> int:
        before = sent
        action()
        return sent - before

    for each in (
        lambda: notes.post("a", "text"),
        lambda: notes.read("a"),
        lambda: notes.append("b", "text"),
        lambda: notes.set_if_absent("c", "text"),
        lambda: notes.erase("a"),
        lambda: notes.count("d", 0),
    ):
        assert cost(each) == 1
    assert cost(lambda: notes.count("d")) == 2
    assert [cost(lambda: notes.raise_alarm("text")) for _ in range(20)] == [3] * 16 + [4] * 4
    assert cost(lambda: notes.let_all_read("e", 1, 0.0)) == 2 + 1
    for ranks in (1, 2, 5):
        place = f"call/{ranks}"
        assert cost(lambda: [come(notes, place, "op", ranks) for _ in range(ranks)]) == 3 * ranks + 1  # noqa: B023
        assert cost(lambda: erase(notes, place)) == 3  # noqa: B023
        assert cost(lambda: erase(notes, place, range(ranks))) == ranks + 3  # noqa: B023


# --- states -----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not is_thorough(), reason="plays all golden programs")
def test_no_program_reaches_other_combinations() -> None:
    found = internals.table_of(internals.reached(range(programs.COUNT)))
    assert found == internals.combinations(), "tools/internals.py: PLAYED lacks a program that reaches these"
