"""The architecture as a table, and the package's import lines against it.

A file imports from lower layers, from earlier rows of its own layer and from its own row, never upwards and never in a
circle. Imports for annotations only (under ``TYPE_CHECKING``) may point upwards for now; those that close a circle are
listed as a debt, which only shrinks. Whoever adds a file adds it here.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "flatfsdp"

ROWS: tuple[tuple[int, str], ...] = (
    (0, "errors waits farewell"),
    (0, "foreign_text"),
    (0, "plain_data"),
    (0, "_torch"),
    (0, "memoryless"),
    (0, "as_on_meta"),
    (0, "api fsdp1_mode"),
    (0, "state_dict_configs"),
    (0, "arguments"),
    (0, "trace"),
    (0, "host_memory"),
    (1, "layout"),
    (1, "boxes runs"),
    (1, "policy"),
    (1, "lifecycle"),
    (2, "device"),
    (2, "storage"),
    (2, "at_exit in_turns gloo"),
    (2, "comm"),
    (2, "comm_hooks"),
    (2, "hooked"),
    (2, "conditions"),
    (2, "values board roll_call timekeeper watch peers calls once_per_job unused stream agree replicas"),
    (2, "exchange messages"),
    (2, "groups"),
    (3, "portion resident"),
    (3, "flat_param"),
    (3, "placeholder"),
    (3, "awaited"),
    (3, "leaf_classes"),
    (3, "hidden"),
    (3, "left_whole"),
    (3, "hooks"),
    (3, "views"),
    (3, "extensions packed"),
    (3, "reduction"),
    (3, "grads"),
    (4, "trees buffers materialise limiter choices midway unit_data unit"),
    (4, "labels links joining residents traversal placement branches stepping backward accumulators root"),
    (4, "registry"),
    (4, "optimizers"),
    (4, "unstepped local_clipping"),
    (5, "owned"),
    (5, "consolidate"),
    (5, "full_params inference"),
    (5, "state_dicts"),
    (5, "optim_state"),
    (5, "dcp_state_dict"),
    (5, "summary fsdp1_names controls participation uneven forward_methods optimizer_in_backward"),
    (5, "nonfinite clip"),
    (5, "flat_state flat_stepping step_flat"),
    (5, "rehearsal"),
    (5, "check_replicas"),
    (6, "wrapper wrap constructing"),
    (6, "build"),
    (6, "auto_wrap copying"),
    (7, "fully_sharded_data_parallel sharded_grad_scaler plan __init__"),
    (7, "as_torch"),
    (7, "checkpoint"),
    (8, "trainer train env examples"),
)
ROW_OF = {name: row for row, (_, names) in enumerate(ROWS) for name in names.split()}
assert len(ROW_OF) == sum(len(names.split()) for _, names in ROWS), "a file has one row"
PROGRAMS = frozenset(ROWS[-1][1].split())  # what a user could have written: public names only
PUBLIC_MODULES = frozenset({"flatfsdp", "flatfsdp.checkpoint", "flatfsdp.wrap", "flatfsdp.errors", "flatfsdp.messages"})

# The seams: what stands in one place, and where.
DISTRIBUTED = PROGRAMS | {
    "_torch",
    "comm",
    "gloo",
    "comm_hooks",
    "board",
    "watch",
    "agree",
    "calls",
    "once_per_job",
    "groups",
    "messages",
    "owned",
    "state_dicts",
    "checkpoint",
    "as_torch",
}
ACCELERATOR = frozenset({"device"})
PRIVATE_TORCH = frozenset({"_torch"})
AUTOGRAD_HOOKS = frozenset({"hooks", "_torch"})
TORCH_FSDP = frozenset({"as_torch"})


@dataclass(frozen=True)
class Import:
    """One imported name: ``from module import name``, or ``import module`` (name '')."""

    module: str
    name: str
    line: int
    alias: str
    typing_only: bool


@dataclass(frozen=True)
class Source:
    """One file of the package. ``unit`` is its name in the table: the file's, or that of the folder it lies in."""

    path: Path
    tree: ast.Module

    @property
    def unit(self) -> str:
        parts = self.path.relative_to(PACKAGE).parts
        return parts[0].removesuffix(".py")

    def at(self, line: int) -> str:
        """A place in the file, for messages."""
        return f"flatfsdp/{self.path.relative_to(PACKAGE)}:{line}"

    def imports(self) -> Iterator[Import]:
        """Every import, with relative modules spelt out."""
        typing_only = {
            id(inner)
            for node in ast.walk(self.tree)
            if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
            for statement in node.body
            for inner in ast.walk(statement)
        }
        package = ["flatfsdp", *self.path.relative_to(PACKAGE).parts[:-1]]
        for node in ast.walk(self.tree):
            free = id(node) in typing_only
            if isinstance(node, ast.Import):
                for alias in node.names:
                    bound = alias.asname or alias.name.partition(".")[0]
                    yield Import(alias.name, "", node.lineno, bound, free)
            elif isinstance(node, ast.ImportFrom):
                base = package[: len(package) - node.level + 1] if node.level else []
                module = ".".join([*base, *([node.module] if node.module else [])])
                for alias in node.names:
                    yield Import(module, alias.name, node.lineno, alias.asname or alias.name, free)

    def mentions(self) -> Iterator[tuple[str, int]]:
        """Every name of torch's that the file imports or reaches from an import, spelt from torch on, with its line."""
        roots = {}
        for each in self.imports():
            if each.module.partition(".")[0] == "torch":
                whole = f"{each.module}.{each.name}" if each.name else each.module
                roots[each.alias] = "torch" if each.alias == "torch" else whole
                yield whole, each.line
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Attribute):
                first, _, rest = ast.unparse(node).partition(".")
                if first in roots and re.fullmatch(r"[\w.]+", rest):
                    yield f"{roots[first]}.{rest}", node.lineno


@lru_cache
def sources() -> tuple[Source, ...]:
    return tuple(Source(path, ast.parse(path.read_text())) for path in sorted(PACKAGE.rglob("*.py")))


def units() -> frozenset[str]:
    return frozenset(source.unit for source in sources())


def own_imports(source: Source) -> Iterator[tuple[str, int]]:
    """The units of the table that a file imports when it runs, with the line."""
    for each in source.imports():
        if each.typing_only or each.module.partition(".")[0] != "flatfsdp":
            continue
        inside = each.module.split(".")[1:]
        # "from flatfsdp import x": x is a file of that name, else something that __init__ offers.
        unit = inside[0] if inside else each.name if each.name in units() else "__init__"
        if unit != source.unit:
            yield unit, each.line


def private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def test_every_file_has_a_row() -> None:
    without = sorted(units() - ROW_OF.keys())
    assert not without, f"say in ROWS which layer these belong to: {without}"


def test_imports_run_downwards() -> None:
    upwards = [
        f"{source.at(line)} (layer {ROWS[ROW_OF[source.unit]][0]}) imports {unit} (layer {ROWS[ROW_OF[unit]][0]})"
        for source in sources()
        for unit, line in own_imports(source)
        if {unit, source.unit} <= ROW_OF.keys() and ROW_OF[unit] > ROW_OF[source.unit]
    ]
    assert not upwards, "\n".join(upwards)


def test_imports_run_in_no_circle() -> None:
    needs: dict[str, set[str]] = {unit: set() for unit in units()}
    for source in sources():
        needs[source.unit] |= {unit for unit, _ in own_imports(source)}
    while ready := [unit for unit, needed in needs.items() if not needed & needs.keys()]:
        for unit in ready:
            del needs[unit]
    assert not needs, f"these import each other in a circle: {needs}"


# Imports for annotations that close a circle of files: importer, then what it imports. It may only shrink.
TYPING_DEBT = """
agree: root
choices: unit
controls: unit
hooked: unit
midway: unit
nonfinite: agree root unit
placement: root
replicas: root unit
residents: root
root: nonfinite
stream: root unit unit_data
trainer/callbacks/base: trainer/trainer
trainer/callbacks/early_stop: trainer/trainer
trainer/callbacks/loss_plot: trainer/trainer
trainer/callbacks/metrics_log: trainer/trainer
trainer/callbacks/progress: trainer/trainer
trainer/callbacks/sample_text: trainer/trainer
trainer/callbacks/summary: trainer/trainer
trainer/loop: trainer/trainer
trainer/optimisation: trainer/arguments
unit: backward root
unit_data: root unit
unused: unit_data
views: extensions
"""


def file_of(module: str) -> str | None:
    """The file behind a dotted name below `flatfsdp`, "" of the package itself, or None."""
    path = PACKAGE.joinpath(*module.split(".")[1:])
    if path.with_suffix(".py").exists() and path != PACKAGE:
        return path.relative_to(PACKAGE).with_suffix("").as_posix()
    return path.relative_to(PACKAGE).as_posix() if (path / "__init__.py").exists() else None


def edges() -> Iterator[tuple[str, str, bool]]:
    """Which file imports which, and whether for annotations only. A package does not count for files inside it."""
    for source in sources():
        own = source.path.relative_to(PACKAGE).with_suffix("").as_posix().removesuffix("__init__").rstrip("/") or "."
        for each in source.imports():
            if each.module.partition(".")[0] != "flatfsdp":
                continue
            found = file_of(f"{each.module}.{each.name}") if each.name else None
            other = found if found is not None else file_of(each.module)
            if other is not None and other != own and not (other == "." or own.startswith(f"{other}/")):
                yield own, other, each.typing_only


def closing(graph: dict[str, set[str]]) -> set[tuple[str, str]]:
    """The edges that lie on a circle."""
    reached: dict[str, set[str]] = {}
    for start in graph:
        seen, left = set(), [start]
        while left:
            new = graph.get(left.pop(), set()) - seen
            seen |= new
            left += new
        reached[start] = seen
    return {(one, other) for one, others in graph.items() for other in others if one in reached.get(other, ())}


def test_imports_for_annotations_close_no_more_circles_than_today() -> None:
    graph: dict[str, set[str]] = {}
    typing_only: dict[tuple[str, str], bool] = {}
    for one, other, free in edges():
        graph.setdefault(one, set()).add(other)
        typing_only[one, other] = free and typing_only.get((one, other), True)
    found = {edge for edge in closing(graph) if typing_only[edge]}
    listed = {
        (one, other)
        for one, _, others in (line.partition(": ") for line in TYPING_DEBT.split("\n"))
        for other in others.split()
    }
    print(f"{len(found)} imports for annotations close a circle:")
    print("\n".join(f"  {one} -> {other}" for one, other in sorted(found)))
    assert not found - listed, f"these close a circle of files: {sorted(found - listed)}"
    assert not listed - found, f"these are paid, take them out of TYPING_DEBT: {sorted(listed - found)}"


def test_circles_are_found() -> None:
    assert closing({"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set()}) == {("b", "c"), ("c", "b")}


def test_every_row_is_of_files_that_are_there() -> None:
    gone = sorted(ROW_OF.keys() - units())
    assert not gone, f"ROWS names files that are not there: {gone}"


def test_programs_use_public_names_only() -> None:
    found = [
        f"{source.at(each.line)} imports {each.name or '(all)'} from {each.module}"
        for source in sources()
        if source.unit in PROGRAMS
        for each in source.imports()
        if each.module.partition(".")[0] == "flatfsdp"
        and each.module.split(".")[1:2] != [source.unit]
        and not (PROGRAMS & set(each.module.split(".")[1:2]))
        and (each.module not in PUBLIC_MODULES or private(each.name))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("names", "allowed"),
    [
        pytest.param(r"torch\.distributed\b", DISTRIBUTED, id="torch.distributed"),
        pytest.param(
            r"torch\.distributed\.(fsdp|_composable|algorithms\._checkpoint)\b", TORCH_FSDP, id="torch's FSDP"
        ),
        pytest.param(r"torch\.(cuda|accelerator|xpu|mps|mtia)\b", ACCELERATOR | PROGRAMS, id="accelerators"),
        pytest.param(r"torch\b.*\._(?!_)", PRIVATE_TORCH, id="private names"),
    ],
)
def test_seams_of_torch(names: str, allowed: frozenset[str]) -> None:
    found = [
        f"{source.at(line)}: {name}"
        for source in sources()
        if source.unit not in allowed
        for name, line in sorted(set(source.mentions()), key=lambda mention: mention[1])
        if re.match(names, name)
    ]
    assert not found, f"these belong into {', '.join(sorted(allowed))}:\n" + "\n".join(found)


def test_only_hooks_registers_with_autograd() -> None:
    registering = re.compile(r"register\w*hook|queue_callback|register_multi_grad_hook")
    found = [
        f"{source.at(node.lineno)}: {node.attr}"
        for source in sources()
        if source.unit not in AUTOGRAD_HOOKS | PROGRAMS
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Attribute)
        and registering.fullmatch(node.attr)
        # modules' and optimizers' own, with which autograd has nothing to do
        and not re.search("state_dict|_step_", node.attr)
        # hooks.py offers functions of such names to the others
        and not (isinstance(node.value, ast.Name) and node.value.id == "hooks")
    ]
    assert not found, "\n".join(found)


def test_memory_is_given_back_by_its_lane_and_never_by_record_stream() -> None:
    found = [
        source.at(node.lineno)
        for source in sources()
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Attribute) and node.attr == "record_stream"
    ]
    assert not found, found


@pytest.mark.parametrize(
    ("text", "unit", "module", "name"),
    [
        ("from . import layout", "root", "flatfsdp", "layout"),
        ("from ..api import Config", "policy/order", "flatfsdp.api", "Config"),
        ("import torch.nn.functional as F", "root", "torch.nn.functional", ""),
    ],
)
def test_the_reader_understands_imports(text: str, unit: str, module: str, name: str) -> None:
    (found,) = Source(PACKAGE / f"{unit}.py", ast.parse(text)).imports()
    assert (found.module, found.name) == (module, name)


def test_the_reader_sees_through_aliases() -> None:
    text = (
        "import torch, torch.distributed as dist\nfrom torch import nn, _C\ndist._x\nnn.a._b\ntorch.cuda.c()\nlocal.d"
    )
    found = {name for name, _ in Source(PACKAGE / "root.py", ast.parse(text)).mentions()}
    assert {"torch.distributed._x", "torch.nn.a._b", "torch.cuda.c", "torch._C"} <= found
    assert not any("local" in name for name in found)


# --- the trainer, inside ----------------------------------------------------------------------------------------------

# Its parts (a folder is one), each importing from earlier rows and its own.
TRAINER_ROWS = (
    "ranks settings stopping sizes terminal",
    "optimisation launch",
    "arguments",
    "tasks model",
    "objectives data_loading state forecast",
    "gradients measuring generate reports",
    "pulse evaluation",
    "callbacks",
    "loop",
    "trainer",
    "demo __init__",
)
TRAINER_ROW_OF = {name: row for row, names in enumerate(TRAINER_ROWS) for name in names.split()}


def test_the_parts_of_the_trainer_import_downwards() -> None:
    upwards = []
    for source in sources():
        if source.unit != "trainer":
            continue
        part = source.path.relative_to(PACKAGE / "trainer").parts[0].removesuffix(".py")
        for each in source.imports():
            inside = each.module.split(".")[2:3] if each.module.startswith("flatfsdp.trainer") else []
            other = inside[0] if inside else each.name if each.module == "flatfsdp.trainer" else part
            if not each.typing_only and TRAINER_ROW_OF.get(other, -1) > TRAINER_ROW_OF.get(part, -1):
                upwards.append(f"{source.at(each.line)} ({part}) imports {other}")
    assert not upwards, "\n".join(upwards)


def test_every_part_of_the_trainer_has_a_row() -> None:
    parts = {path.stem for path in (PACKAGE / "trainer").iterdir() if path.suffix in ("", ".py")} - {"__pycache__"}
    assert parts == TRAINER_ROW_OF.keys()
