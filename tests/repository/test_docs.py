"""Every public name is documented in its docstring, and the examples in docstrings run."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import pkgutil
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

import flatfsdp
import flatfsdp.errors
import flatfsdp.wrap

pytestmark = pytest.mark.unit

PUBLIC_MODULES = (flatfsdp, flatfsdp.wrap, flatfsdp.errors)
POLICY_PROTOCOL = frozenset({"module", "recurse", "nonwrapped_numel"})  # arguments of every policy, explained once


def public_names() -> Iterator[tuple[str, Any]]:
    """(dotted name, object) of the public interface: public modules, their names, and those classes' members."""
    for module in PUBLIC_MODULES:
        yield module.__name__, module
        for name in module.__all__:
            found = getattr(module, name)
            yield f"{module.__name__}.{name}", found
            if isinstance(found, type):
                for attribute, value in members(found):
                    yield f"{module.__name__}.{name}.{attribute}", value


def members(kind: type) -> Iterator[tuple[str, Any]]:
    """Public methods and properties that flatfsdp itself defines for a class."""
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] == "flatfsdp":
            for name, value in vars(base).items():
                value = getattr(value, "__func__", value)  # of static and class methods
                if not name.startswith("_") and (inspect.isfunction(value) or isinstance(value, property)):
                    yield name, value


def arguments_of(found: Any) -> list[str]:
    """The arguments that the docstring of a public name has to explain: not those that it takes over from torch."""
    if isinstance(found, type):
        if issubclass(found, (Enum, BaseException)) or is_dataclass(found) or issubclass(found, flatfsdp.Stats):
            return []
        torchs = next((base for base in found.__mro__ if base.__module__.partition(".")[0] == "torch"), object)
        known = {"self", *inspect.signature(torchs.__init__).parameters}
        found = vars(found).get("__init__")
    else:
        known = {"self", *(POLICY_PROTOCOL if getattr(found, "__module__", "") == "flatfsdp.wrap" else ())}
    if not inspect.isfunction(found) or (hasattr(nn.Module, found.__name__) and found.__name__ != "__init__"):
        return []
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(found).parameters.values()
    return [each.name for each in parameters if each.name not in known and each.kind not in variadic]


PUBLIC = dict(public_names())


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_documented(name: str) -> None:
    text = PUBLIC[name].__doc__ or ""  # its own: one inherited from torch does not describe flatfsdp
    assert re.match(r"\S[^.:]*[.:]", text), f"the docstring of {name} should begin with a sentence, found {text[:60]!r}"


@pytest.mark.parametrize("name", [name for name, found in PUBLIC.items() if arguments_of(found)])
def test_every_argument_is_explained(name: str) -> None:
    text = PUBLIC[name].__doc__ or ""
    missing = [argument for argument in arguments_of(PUBLIC[name]) if not re.search(rf"\b{argument}\b", text)]
    assert not missing, f"the docstring of {name} does not mention {', '.join(missing)}"


@pytest.mark.parametrize("kind", [flatfsdp.MixedPrecision, flatfsdp.CPUOffload])
def test_every_field_is_explained(kind: Any) -> None:
    (definition,) = ast.parse(inspect.getsource(kind)).body
    assert isinstance(definition, ast.ClassDef)
    explained = [
        ast.unparse(field.target)
        for field, below in zip(definition.body, definition.body[1:], strict=False)
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
    ]
    assert explained == [field.name for field in fields(kind)]


@pytest.mark.parametrize("kind", [flatfsdp.ShardingStrategy, flatfsdp.BackwardPrefetch])
def test_every_member_is_explained(kind: type[Enum]) -> None:
    assert [name for name in kind.__members__ if f"``{name}``" not in (kind.__doc__ or "")] == []


def test_the_arguments_of_the_wrapper_are_listed_in_order() -> None:
    wrapper = flatfsdp.FullyShardedDataParallel
    text = inspect.cleandoc(wrapper.__doc__ or "").partition("Args:\n")[2].partition("\n\n")[0]
    listed = re.findall(r"^    (\w+): ", text, flags=re.MULTILINE)
    assert listed == [name for name in inspect.signature(wrapper).parameters]


# --- examples ---------------------------------------------------------------------------------------------------------


def examples() -> Iterator[doctest.DocTest]:
    """The examples in the docstrings of the library; programs (the trainer, the examples) have tests of their own."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    for found in pkgutil.walk_packages(flatfsdp.__path__, "flatfsdp."):
        if found.name.split(".")[1] not in ("trainer", "train", "examples", "env"):
            module = importlib.import_module(found.name)
            yield from (test for test in finder.find(module, module.__name__) if test.examples)


@pytest.fixture
def single_process(example: doctest.DocTest) -> Iterator[None]:
    """The process group that examples take for granted: this process alone. Dry runs make their own."""
    if any(name in (example.docstring or "") for name in ("dry_run(", "flatfsdp.advise(")):
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("single_process")
@pytest.mark.parametrize("example", [*examples()], ids=lambda example: example.name)
def test_examples_in_docstrings_run(example: doctest.DocTest) -> None:
    report: list[str] = []
    failed, tried = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(example, out=report.append)
    assert tried and not failed, "".join(report)


def test_the_main_entries_have_examples() -> None:
    shown = {example.name for example in examples()}
    assert {
        "flatfsdp.fully_sharded_data_parallel.FullyShardedDataParallel",
        "flatfsdp.sharded_grad_scaler.ShardedGradScaler",
        "flatfsdp.engine.inspection.summary.stats",
        "flatfsdp.wrap.ModuleWrapPolicy",
        "flatfsdp.wrap.CustomPolicy",
    } <= shown


def test_each_note_stands_in_one_place() -> None:
    """A note fixes the meaning of a term: it is defined where a sentence, or a paragraph, follows its name."""
    text = {path: path.read_text() for path in sorted(Path(flatfsdp.__file__).parent.rglob("*.py"))}
    begins = re.compile(r"^\s*(?:# )?\[Note: ([^]\n]+)\](?: \S|\n(?!\s*\"\"\"))", re.M)
    defined = Counter(name for each in text.values() for name in begins.findall(each))
    named = {" ".join(name.split()) for each in text.values() for name in re.findall(r"\[Note: ([^]]+)\]", each)}
    several = sorted(name for name, count in defined.items() if count > 1)
    assert not several, f"defined in several places: {several}"
    assert not named - defined.keys(), f"defined nowhere: {sorted(named - defined.keys())}"


def test_the_reader_s_tour_names_files_that_are_there() -> None:
    package = Path(flatfsdp.__file__).parent
    page = (package.parent / "docs" / "internals" / "how_it_works.md").read_text()
    assert page.count("\n") <= 60, "the tour is read at one sitting"
    places = {path.relative_to(package).as_posix() + "/" * path.is_dir() for path in package.rglob("*")}
    named = set(re.findall(r"[\w/]*(?:\{[\w,]+\})?\w*\.py\b|\b\w+(?:/\w+)*/(?!\w)", page))
    for each in [each for each in named if "{" in each]:
        before, several, after = re.split(r"[{}]", each)
        named = (named - {each}) | {f"{before}{one}{after}" for one in several.split(",")}
    found = {each for each in named if any(f"/{place}".endswith(f"/{each}") for place in places)}
    assert len(found) > 20, "the page names hardly any file: the test shows nothing"
    assert not named - found - {"flatfsdp/", "tests/repository/test_layering.py"}, sorted(named - found)


def test_docstrings_and_comments_name_files_that_are_there() -> None:
    root = Path(flatfsdp.__file__).parents[1]
    places = [
        f"/{path.relative_to(root)}"
        for folder in ("flatfsdp", "tests", "tools")
        for path in (root / folder).rglob("*.py")
    ]
    named = {
        (path.relative_to(root).as_posix(), name)
        for path in (root / "flatfsdp").rglob("*.py")
        for name in re.findall(r"[\w./]*\w\.py\b", path.read_text())
    }
    gone = {each for each in named if not any(place.endswith(f"/{each[1]}") for place in places)}
    assert gone == {("flatfsdp/as_torch.py", "script.py")}, f"named where nothing is: {sorted(gone)}"  # a user's


# Verbs of speech for actions of programs, and former terms that the field does not have.
UNWANTED = re.compile(
    r"\b(told|tells?|says?|said|speaks?|hears?|heard|silent|silence|obituar\w*|farewell|midway|lent|residents?(?! set)"
    r"|portions?|exposure)\b|\broll.call\b|, say,|\bas ever\b"
)


# The engine's vocabulary before "The house", in tests, too.
RETIRED = re.compile(
    r"(\b|_)(told|speak|hear|obituar\w*|farewell|midway|lent|lingering|habits?|portions?|nearby|hand_over|rehears\w*"
    r"|foretells?|roll_call)(\b|_)"
)


def lines_with(words: re.Pattern[str], pages: Iterable[Path], root: Path) -> list[str]:
    return [
        f"{path.relative_to(root)}: {line.strip()}"
        for path in pages
        if path.name not in ("test_docs.py", "traces.py")  # which have the old names
        for line in path.read_text().splitlines()
        if words.search(line)
    ]


def test_programs_report_and_do_not_speak() -> None:
    root = Path(flatfsdp.__file__).parents[1]
    pages = [root / "README.md", *(root / "docs").rglob("*.md"), *(root / "flatfsdp").rglob("*.py")]
    found = lines_with(UNWANTED, pages, root) + lines_with(RETIRED, (root / "tests").rglob("*.py"), root)
    assert not found, "report, record, compare, notify...:\n" + "\n".join(found)


# Clauses that stand for the thing that they should name, and people's pronouns for programs.
UNNAMED = re.compile(r'^\s*[rf]?"""(What|Who|Whoever|Whatever)\b|\b[Ww]hoever\b')


def test_docstrings_name_things() -> None:
    root = Path(flatfsdp.__file__).parents[1]
    found = lines_with(UNNAMED, (root / "flatfsdp").rglob("*.py"), root)
    assert not found, "name the thing, by a noun or, of a function, a verb:\n" + "\n".join(found)
