"""Rewrites the parts of docs/internals that are made from the code: the walked step, states, notes, imports, tests.

    .venv/bin/python -m tools.internals [--check]

A part begins with a comment that names it, ``<!-- made by tools/internals.py: NAME -->``, and ends with
``<!-- end -->``. With ``--check`` nothing is written: the exit status is 1 if a part differs from the code. In either
case the differences are printed.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import re
import sys
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import flatfsdp
from tests.conftest import TIERS
from tests.golden import traces
from tests.harness import inspect
from tests.harness.fake import fake_world
from tests.repository import test_layering as layering

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "flatfsdp"
PAGES = ROOT / "docs" / "internals"
PART = re.compile(r"(<!-- made by tools/internals\.py: (.+?) -->\n).*?(<!-- end -->)", re.DOTALL)

# --- docstrings -------------------------------------------------------------------------------------------------------


@lru_cache
def functions(file: str) -> dict[int, tuple[str, str]]:
    """The class, or "", and the docstring of each function of a file, by the line at which it begins, decorators
    included."""
    tree = ast.parse(Path(file).read_text())
    owners = {id(each): node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for each in node.body}
    return {
        min([node.lineno, *(each.lineno for each in node.decorator_list)]): (
            owners.get(id(node), ""),
            ast.get_docstring(node) or "",
        )
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    }


def first_sentence(text: str) -> str:
    """The first sentence of a text, on one line, without references to notes, in Markdown."""
    text = re.sub(r"\s*\(?\[Note: [^]]+\]\)?", "", " ".join(text.split())).replace("``", "`")
    return re.split(r"(?<=[.?])\s+(?=[^a-z])", text.strip())[0].rstrip(".")


def summary_of(text: str) -> str:
    """The first sentence of a docstring, without what it has on arguments."""
    words = re.split(r"[;:](?: |$)", first_sentence(text))[0]
    words = words.rpartition(" (")[0] if words.count("(") > words.count(")") else words
    return "" if re.fullmatch(r"`\w+`", words) else words


# --- the walked step --------------------------------------------------------------------------------------------------

COLLECTIVES = {"_allgather_base_": "all-gather", "_reduce_scatter_base_": "reduce-scatter"}
LONG = 4  # lines that are not repeated
LEADS = 3  # lines after which a function is of interest that has no verb
DECIDES = re.compile(r"\w+Schedule$")  # what is asked there decides what is done
BOOKKEEPING = re.compile(r"(base/events|comm/comm_stats|agreement/sequence_predictor|layout/layout)\.py$|record_event$")
STILL = re.compile(
    r"((Whether|Which|The|An?|This|All|Each|One|It|Of|By|Every|No|None|These|Those|Its|Units|Bytes)\b|`)"
)


class Step(NamedTuple):
    """One line of a walk: a function that was called, or an event outside of the engine (`file` is "")."""

    depth: int
    file: str
    owner: str  # the class of the function
    function: str
    words: str

    @property
    def place(self) -> tuple[str, str, str]:
        """Equal for calls of one function, and for equal events."""
        return self.file, self.owner, self.function or self.words

    @property
    def room(self) -> tuple[str, str]:
        """The class, or the functions of the file outside of classes."""
        return self.file, self.owner


USER = Step(0, "the user's program", "", "", "")


class Block(nn.Module):
    """One unit of the walked model."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


class Walk(TorchDispatchMode):
    """Follows calls of the engine's functions, collectives, and forwards of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Step] = []
        self._depth = 0

    def run(self, action: Callable[[], Any]) -> list[Step]:
        """The steps of `action`."""
        with self:
            sys.setprofile(self._profile)
            try:
                action()
            finally:
                sys.setprofile(None)
        return self.steps

    def _profile(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        file = code.co_filename
        ours = file.startswith(f"{PACKAGE}/")
        if event == "call" and ours:
            owner, text = functions(file).get(code.co_firstlineno, ("", ""))
            place = Path(file).relative_to(PACKAGE).as_posix().removeprefix("engine/")
            self.steps.append(Step(self._depth, place, owner, code.co_name, summary_of(text)))
            self._depth += 1
        elif event == "return" and ours:
            self._depth -= 1
        elif event == "call" and code is Block.forward.__code__:
            self.steps.append(Step(self._depth, "", "", "", "the module computes"))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func._schema.name.removeprefix("c10d::")
            self.steps.append(Step(self._depth, "", "", "", COLLECTIVES.get(name, name.strip("_"))))
        return func(*args, **(kwargs or {}))


class Walked(NamedTuple):
    """The steps of each part of a training step, and the engine's events in it."""

    steps: dict[str, list[Step]]
    events: dict[str, list[str]]


@lru_cache
def walked(front: str) -> Walked:
    """A forward, a backward and an optimizer's step of a model of three units, of which two are blocks."""
    with fake_world(4) as group:
        net = nn.Sequential(OrderedDict(first=Block(), second=Block()))
        if front == "wrapper":
            wrap: Any = flatfsdp.FullyShardedDataParallel
            for number in range(2):
                net[number] = wrap(net[number], process_group=group, use_orig_params=True)
            model = wrap(net, process_group=group, use_orig_params=True)
        else:
            mesh = torch.distributed.device_mesh.DeviceMesh.from_group(group, "cpu")
            for each in net:
                flatfsdp.fully_shard(each, mesh=mesh)
            model = flatfsdp.fully_shard(net, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses: list[torch.Tensor] = []
        parts: dict[str, Callable[[], Any]] = {
            "forward": lambda: losses.append(model(torch.ones(2, 16)).sum()),
            "backward": lambda: losses.pop().backward(),
            "optimizer": lambda: (optimizer.step(), optimizer.zero_grad()),
        }
        for _ in range(4):
            for part in parts.values():
                part()
        steps = {name: Walk().run(part) for name, part in parts.items()}
        events = {}
        for name, part in parts.items():
            with inspect.events(model).listening() as happened:
                part()
            events[name] = [f"{each.kind} {each.unit or 'root'}" for each in happened]
        return Walked(steps, events)


class Call(NamedTuple):
    """A step and those that it has led to."""

    step: Step
    inner: list[Call]

    @property
    def place(self) -> tuple[str, str, str]:
        return self.step.place

    @property
    def size(self) -> int:
        return 1 + sum(each.size for each in self.inner)

    def shape(self) -> tuple[Any, ...]:
        """Equal for calls that lead to the same ones."""
        return self.place, *(each.shape() for each in self.inner)


def calls_of(steps: list[Step]) -> list[Call]:
    """A walk as calls inside of each other."""
    outermost: list[Call] = []
    running: list[Call] = []
    for step in steps:
        while running and running[-1].step.depth >= step.depth:
            running.pop()
        call = Call(step, [])
        (running[-1].inner if running else outermost).append(call)
        running.append(call)
    return outermost


def actions(calls: list[Call], around: tuple[str, str] = ("", "")) -> list[Call]:
    """The calls that do something: each enters another class or file than `around`, or leads into one. Calls that only
    answer a question are left out, and equal ones that follow in the same call."""
    found: list[Call] = []
    for call in calls:
        step = call.step
        inner = actions(call.inner, step.room)
        hidden = BOOKKEEPING.search(step.file) or BOOKKEEPING.search(step.function) or step.function.startswith("<")
        hidden = hidden or (not step.words and step.function.startswith("_"))
        still = STILL.match(step.words) and sum(each.size for each in inner) < LEADS and not DECIDES.match(step.owner)
        if step.file and (hidden or still):
            found += [each for each in inner if each.step.room != around or each.inner]
        elif inner or step.room != around:
            found.append(Call(step, inner))
    seen: set[tuple[Any, ...]] = set()
    return [each for each in found if (shape := each.shape()) not in seen and not seen.add(shape)]


Place = tuple[str, str, str]
Edges = set[tuple[Place, Place]]


def lines_of(calls: list[Call], seen: Edges, depth: int = 0) -> Iterator[str]:
    """The calls as a list in Markdown. Where a function is called again, only what it did not call before is listed."""
    for call in calls:
        step = call.step
        again = call.size >= LONG and any(before == call.place for before, _ in seen)
        inner = unseen(call, seen) if again else call.inner
        words = f": {step.words}" if step.words else ""
        line = f"`{step.file}` **{step.function}**{words}" if step.function else f"**→ {step.words or step.file}**"
        yield f"{'  ' * depth}- {line}{'' if not again else '; as above, and' if inner else '; as above'}"
        seen |= {(call.place, each.place) for each in call.inner}
        yield from lines_of(inner, seen, depth + 1)


def unseen(call: Call, seen: Edges) -> list[Call]:
    """The calls in `call` that were not listed under its function, and those that lead to such ones."""
    found = []
    for each in call.inner:
        if (call.place, each.place) not in seen:
            found.append(each)
        elif inner := unseen(each, seen):
            found.append(Call(each.step, inner))
    return found


def in_words(front: str, action: str) -> str:
    """The events of a walk, and its calls as a list in Markdown."""
    lines = [*lines_of(actions(calls_of(walked(front).steps[action])), set())]
    if happened := walked(front).events[action]:
        lines[:0] = [f"Events: {', '.join(happened)}.", ""]
    return "\n".join(lines)


def only_there(calls: list[Call], known: set[Place], around: Step) -> Iterator[Call]:
    """The calls of functions that are not `known`, up to known ones; each inside of the one that leads to it."""
    for call in calls:
        inner = call.inner
        if call.place not in known:
            unknown, inner = until(call, known)
            yield Call(around._replace(words=""), [unknown])
        for each in inner:
            yield from only_there([each], known, call.step)


def until(call: Call, known: set[Place]) -> tuple[Call, list[Call]]:
    """The call without those in known ones, and these."""
    inner: list[Call] = []
    left: list[Call] = []
    for each in call.inner:
        if each.place in known:
            inner.append(Call(each.step, []))
            left += each.inner
        else:
            unknown, more = until(each, known)
            inner.append(unknown)
            left += more
    return Call(call.step, inner), left


def difference(front: str, other: str) -> str:
    """What the walks of a front have that those of the `other` have not."""
    known = {step.place for steps in walked(other).steps.values() for step in steps}
    merged: dict[Place, Call] = {}
    for steps in walked(front).steps.values():
        for call in only_there(actions(calls_of(steps)), known, USER):
            inner = merged.setdefault(call.place, Call(call.step, [])).inner
            inner += [each for each in call.inner if each.place not in [old.place for old in inner]]
    return "\n".join(lines_of([*merged.values()], set()))


# --- notes ------------------------------------------------------------------------------------------------------------

NOTE = re.compile(
    r"^\s*\[Note: ([^]\n]+)\](?: (?=\S)|\n(?!\s*\"\"\"))(.*(?:\n(?!\s*\n|\s*\"\"\").+)*)"
    r"|^\s*# \[Note: ([^]\n]+)\] ?(.*(?:\n\s*# .+)*)",
    re.MULTILINE,
)


def notes() -> Iterator[tuple[str, str, str]]:
    """(file, name, first sentence) of every note of the package."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for found in NOTE.finditer(path.read_text()):
            words = re.sub(r"\n\s*# ?", "\n", re.sub(r"\n\s*", "\n", found[2] or found[4]))
            words = first_sentence(re.sub(r"\n[-*] .*", "", words, flags=re.DOTALL))
            yield path.relative_to(PACKAGE).as_posix(), found[1] or found[3], words


def index_of_notes() -> str:
    """A table for each package."""
    rooms: defaultdict[str, list[str]] = defaultdict(list)
    for file, name, words in notes():
        parts = file.split("/")
        room = "/".join(parts[:2]) if parts[0] == "engine" else parts[0]
        rooms[room.removeprefix("engine/")].append(
            f"| {name} | `{file.removeprefix('engine/')}` | {words.replace('|', chr(92) + '|')}. |"
        )
    return "\n\n".join(
        f"## {room}\n\n| note | file | its first sentence |\n|---|---|---|\n" + "\n".join(rows)
        for room, rows in rooms.items()
    )


# --- tests ------------------------------------------------------------------------------------------------------------

TESTS = ROOT / "tests"
TIER = re.compile(rf"^pytestmark = \[?\s*pytest\.mark\.({'|'.join(TIERS)})\b", re.MULTILINE)


def index_of_tests() -> str:
    """A table for each capability: its files, their tiers, the first sentences of their docstrings."""
    rooms: defaultdict[str, list[str]] = defaultdict(list)
    for path in sorted(TESTS.rglob("test_*.py")):
        text, file = path.read_text(), path.relative_to(TESTS)
        tier, words = TIER.search(text), first_sentence(ast.get_docstring(ast.parse(text)) or "")
        assert tier is not None and words, f"{path} has no tier, or no docstring"
        name = "/".join(file.parts[1:]).removesuffix(".py")
        rooms[file.parts[0]].append(f"| `{name}` | {tier[1]} | {words.replace('|', chr(92) + '|')}. |")
    return "\n\n".join(
        f"## {room}\n\n| file | tier | behavior |\n|---|---|---|\n" + "\n".join(rows) for room, rows in rooms.items()
    )


# --- packages ---------------------------------------------------------------------------------------------------------


def packages() -> str:
    """The packages of the engine from the lowest row of the table of imports up, with their docstrings."""
    lines = ["| row | package | owns | imports |", "|---|---|---|---|"]
    for row, names in enumerate(layering.ROWS):
        for name in names.split():
            if not name.startswith("engine/"):
                continue
            words = ast.get_docstring(ast.parse((PACKAGE / name / "__init__.py").read_text())) or ""
            owns, _, imports = " ".join(words.split()).partition("Imports ")
            imports = re.split(r"[;.](?: |$)", imports)[0]
            lines.append(f"| {row} | `{name.removeprefix('engine/')}` | {first_sentence(owns)} | {imports} |")
    return "\n".join(lines)


# --- states -----------------------------------------------------------------------------------------------------------


def machine(name: str) -> Callable[[], str]:
    """The transitions of a table of the engine."""

    def table() -> str:
        lines = ["| from | to |", "|---|---|"]
        for state, targets in inspect.STATE_MACHINES[name].items():
            lines.append(f"| {state.value} | {', '.join(sorted(each.value for each in targets))} |")
        return "\n".join(lines)

    return table


# Golden programs that reach together what all of them reach.
PLAYED = (0, 1, 13, 23, 28, 50, 69, 100, 103, 107, 113, 132, 148, 177, 214, 249, 312, 328)


@lru_cache
def reached(numbers: Sequence[int] = PLAYED) -> Set[tuple[str, ...]]:
    """The combinations of states that flat parameters have at the events of these golden programs."""
    found: set[tuple[str, ...]] = set()
    original = traces.Recorder._note

    def note(recorder: Any, event: inspect.Event) -> None:
        original(recorder, event)
        found.update(inspect.states(recorder._model))

    traces.Recorder._note = note  # type: ignore[method-assign]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for number in numbers:
                traces.trace_of(number)
    finally:
        traces.Recorder._note = original  # type: ignore[method-assign]
    return found


def combinations() -> str:
    """The reached combinations, as a table."""
    return table_of(reached())


def table_of(found: Set[tuple[str, ...]]) -> str:
    """One row for each phase, place of the data and mode of leaves, with the places of gradients and the stages."""
    gradients: defaultdict[tuple[str, ...], set[str]] = defaultdict(set)
    stages: defaultdict[tuple[str, ...], set[str]] = defaultdict(set)
    for stage, phase, shard, leaves, place in found:
        stages[phase, shard, leaves].add(stage)
        gradients[phase, shard, leaves].add(place)
    lines = ["| phase | shard | leaves | gradients | stage |", "|---|---|---|---|---|"]
    for key in sorted(stages):
        lines.append(f"| {' | '.join(key)} | {', '.join(sorted(gradients[key]))} | {', '.join(sorted(stages[key]))} |")
    return "\n".join(lines)


# --- the pages --------------------------------------------------------------------------------------------------------

PARTS: Mapping[str, Callable[[], str]] = {
    **{
        f"wrapper {action}": lambda action=action: in_words("wrapper", action)
        for action in ("forward", "backward", "optimizer")
    },
    "fully_shard": lambda: difference("fully_shard", "wrapper"),
    "notes": index_of_notes,
    "packages": packages,
    "tests": index_of_tests,
    **{f"steps of {name}": machine(name) for name in inspect.STATE_MACHINES},
    "combinations": combinations,
}


def renewed(page: str) -> str:
    """The text of a page with its parts made anew."""
    return PART.sub(lambda part: f"{part[1]}\n{PARTS[part[2]]()}\n\n{part[3]}", page)


def main() -> int:
    """Rewrite the pages, or compare them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 if a part is stale")
    asked, stale = parser.parse_args(), 0
    for path in sorted(PAGES.glob("*.md")):
        text = path.read_text()
        if (new := renewed(text)) == text:
            continue
        stale = 1
        name = path.relative_to(ROOT).as_posix()
        print(
            "\n".join(difflib.unified_diff(text.splitlines(), new.splitlines(), name, f"{name}, new", lineterm="", n=1))
        )
        if not asked.check:
            path.write_text(new)
    return stale if asked.check else 0


if __name__ == "__main__":
    sys.exit(main())
