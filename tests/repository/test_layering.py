"""The architecture as a table, and the package's import lines against it.

`ROWS` has the public files, the folders and the packages of the engine. A file imports from earlier rows and from its
own package, in no circle of files, at module level, in functions and for annotations (under ``TYPE_CHECKING``),
without exception.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

PACKAGE = Path(__file__).resolve().parents[2] / "flatfsdp"

ROWS = (
    "errors",
    "api comm_hooks",
    "engine/base",
    "engine/layout engine/schedule",
    "engine/config engine/watchdog engine/device engine/parts engine/planning",
    "wrap engine/comm",
    "engine/transports",
    "engine/cpu engine/few_bits",
    "engine/flat",
    "engine/runtime engine/agreement engine/transforms",
    "engine/models",
    "engine/guards messages extensions",
    "engine/state engine/dtensor",
    "engine/features",
    "engine/wrapping engine/facade",
    "engine/fully_shard",
    "fully_sharded_data_parallel fsdp_module sharded_grad_scaler layout",
    "engine/inspection",
    "__init__",
    "as_torch checkpoint",
    "elastic",
    "trainer train env examples",
)
ROW_OF = {name: row for row, names in enumerate(ROWS) for name in names.split()}
assert len(ROW_OF) == sum(len(names.split()) for names in ROWS), "a file has one row"
ENTRIES = 20  # in flatfsdp/ at most
PROGRAMS = frozenset(ROWS[-1].split())  # user-level code: public names only, and imports of each other
PUBLIC_MODULES = frozenset(
    f"flatfsdp{each}" for each in ("", ".checkpoint", ".elastic", ".wrap", ".errors", ".messages")
)

# The seams: code that stands in one place, and the place (names in ROWS, and files of the engine).
DISTRIBUTED = PROGRAMS | {
    "as_torch",
    "checkpoint",
    "comm_hooks",
    "elastic",
    "messages",
    "engine/base/_dtensor",
    "engine/base/_torch",
    "engine/dtensor",
    "engine/watchdog/regions",
    "engine/watchdog/store",
    "engine/watchdog/watchdog",
    "engine/comm",
    "engine/transports",
    "engine/cpu",
    "engine/agreement/collective_calls",
    "engine/agreement/once_per_job",
    "engine/state/owned_interval",
    "engine/state/model/distributed_values",
    "engine/agreement/process_groups",
}
ACCELERATOR = frozenset({"engine/device/streams"})
# The last puts our names where programs look for torch's, private modules of FSDP2 among them.
SHIMS = {f"engine/base/{each}" for each in ("_torch", "_dtensor", "_dynamo", "_functorch")}
PRIVATE_TORCH = frozenset({*SHIMS, "as_torch"})
AUTOGRAD_HOOKS = frozenset({"engine/base/autograd", "engine/base/_torch"})
TORCH_FSDP = frozenset({"as_torch"})


@dataclass(frozen=True)
class Import:
    """One imported name: ``from module import name``, or ``import module`` (name '')."""

    module: str
    name: str
    line: int
    alias: str


@dataclass(frozen=True)
class Source:
    """One file of the package. ``unit`` is its name in the table: the file's, or that of the folder it lies in; inside
    the engine that of the package."""

    path: Path
    tree: ast.Module

    @property
    def unit(self) -> str:
        return unit_of(self.file)

    @property
    def file(self) -> str:
        """Its path below the package, without the suffix."""
        return self.path.relative_to(PACKAGE).with_suffix("").as_posix()

    def is_one_of(self, allowed: frozenset[str]) -> bool:
        """Whether it, or its unit, is among `allowed`."""
        return not allowed.isdisjoint({self.unit, self.file})

    def at(self, line: int) -> str:
        """A place in the file, for messages."""
        return f"flatfsdp/{self.path.relative_to(PACKAGE)}:{line}"

    def imports(self) -> tuple[Import, ...]:
        """Every import, with relative modules spelt out."""
        return imports_of(self)

    def _imports(self) -> Iterator[Import]:
        package = ["flatfsdp", *self.path.relative_to(PACKAGE).parts[:-1]]
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    bound = alias.asname or alias.name.partition(".")[0]
                    yield Import(alias.name, "", node.lineno, bound)
            elif isinstance(node, ast.ImportFrom):
                base = package[: len(package) - node.level + 1] if node.level else []
                module = ".".join([*base, *([node.module] if node.module else [])])
                for alias in node.names:
                    yield Import(module, alias.name, node.lineno, alias.asname or alias.name)

    def mentions(self) -> tuple[tuple[str, int], ...]:
        """Every name of torch's that the file imports or reaches from an import, spelt from torch on, with its line."""
        return mentions_of(self)

    def _mentions(self) -> Iterator[tuple[str, int]]:
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


@cache
def imports_of(source: Source) -> tuple[Import, ...]:
    return tuple(source._imports())


@cache
def mentions_of(source: Source) -> tuple[tuple[str, int], ...]:
    return tuple(source._mentions())


@cache
def sources() -> tuple[Source, ...]:
    return tuple(Source(path, ast.parse(path.read_text())) for path in sorted(PACKAGE.rglob("*.py")))


def unit_of(file: str) -> str:
    """The name in ROWS that a file belongs to. The engine's own `__init__` belongs to none."""
    parts = file.split("/")
    return "/".join(parts[: 2 if parts[0] == "engine" else 1])


def units() -> frozenset[str]:
    return frozenset(source.unit for source in sources()) - {"engine/__init__"}


def private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def test_every_file_has_a_row() -> None:
    without = sorted(units() - ROW_OF.keys())
    assert not without, f"these belong to no row of ROWS; files of the engine go into its packages: {without}"


def test_every_row_is_of_files_that_are_there() -> None:
    gone = sorted(ROW_OF.keys() - units())
    assert not gone, f"ROWS names files that are not there: {gone}"


def test_the_top_folder_is_small() -> None:
    found = sorted(path.name for path in PACKAGE.iterdir() if path.name != "__pycache__")
    assert len(found) <= ENTRIES, f"{len(found)} entries; what is not public belongs to flatfsdp/engine: {found}"


@pytest.mark.parametrize("package", sorted({"engine", *(name for name in ROW_OF if name.startswith("engine/"))}))
def test_packages_document_what_they_own_and_may_import(package: str) -> None:
    tree = ast.parse((PACKAGE / package / "__init__.py").read_text())
    words = ast.get_docstring(tree)
    assert words is not None and len(tree.body) == 1, f"flatfsdp/{package}/__init__.py has a docstring, nothing else"
    assert re.search(r"\bImports\b", words), f"flatfsdp/{package}: what may it import?"


def documented_imports(package: str) -> frozenset[str]:
    """The packages that the docstring of `package` lets it import: those it names, and with "what ... import(s)" what
    these may import in turn."""
    words = ast.get_docstring(ast.parse((PACKAGE / "engine" / package / "__init__.py").read_text())) or ""
    _, _, imports = words.partition("Imports")
    named = re.findall(r"`(\w+)`", imports)
    packages = frozenset(name for name in named if f"engine/{name}" in ROW_OF)
    if "every other package" in imports:
        return frozenset(name.removeprefix("engine/") for name in ROW_OF if name.startswith("engine/")) - {package}
    if re.search(r"\b(?:what|that)\s+(these|it)\s+imports?", imports):
        return packages.union(*map(documented_imports, packages))
    return packages


@pytest.mark.parametrize("package", sorted(name[7:] for name in ROW_OF if name.startswith("engine/")))
def test_packages_import_what_their_docstrings_list(package: str) -> None:
    found = {
        unit_of(other).removeprefix("engine/")
        for one, other in edges()
        if unit_of(one) == f"engine/{package}" != unit_of(other) and other.startswith("engine/")
    }
    assert found <= documented_imports(package), f"not in its docstring: {found - documented_imports(package)}"


def test_tests_lie_in_rooms_named_like_packages() -> None:
    tests = PACKAGE.parent / "tests"
    packages = {name.removeprefix("engine/") for name in ROW_OF if name.startswith("engine/")}
    others = {"checkpoint", "elastic", "trainer", "repository", "tools", "harness"}
    rooms = {
        room.name
        for room in tests.iterdir()
        if room.is_dir() and any(room.rglob("test_*.py")) and room.name not in packages | others
    }
    assert not rooms, f"these are called like no package: {sorted(rooms)}"


def points_down(one: str, other: str) -> bool:
    """Whether a file of `one` may import a file of `other`, names in ROWS."""
    programs = {one, other} <= PROGRAMS
    return one == other or programs or ROW_OF[other] < ROW_OF[one]


def test_imports_run_downwards() -> None:
    upwards = [
        f"flatfsdp/{one}.py imports {other}" for one, other in edges() if not points_down(unit_of(one), unit_of(other))
    ]
    assert not upwards, "\n".join(upwards)


def test_imports_run_in_no_circle() -> None:
    graph: dict[str, set[str]] = {}
    for one, other in edges():
        graph.setdefault(one, set()).add(other)
    found = closing(graph)
    assert not found, f"these close a circle: {sorted(found)}"


def file_of(module: str) -> str | None:
    """The file behind a dotted name below `flatfsdp`, without its suffix, or None."""
    path = PACKAGE.joinpath(*module.split(".")[1:])
    if path != PACKAGE and path.with_suffix(".py").exists():
        return path.relative_to(PACKAGE).with_suffix("").as_posix()
    return (path / "__init__").relative_to(PACKAGE).as_posix() if (path / "__init__.py").exists() else None


@cache
def edges() -> tuple[tuple[str, str], ...]:
    """The imports of each file, also those for annotations."""
    return tuple(_edges())


def _edges() -> Iterator[tuple[str, str]]:
    for source in sources():
        for each in source.imports():
            if each.module.partition(".")[0] != "flatfsdp":
                continue
            found = file_of(f"{each.module}.{each.name}") if each.name else None
            other = found if found is not None else file_of(each.module)
            assert other is not None, f"{source.at(each.line)} imports {each.module}, which is not there"
            if other != source.file:
                yield source.file, other


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


def test_circles_are_found() -> None:
    assert closing({"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set()}) == {("b", "c"), ("c", "b")}


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
            r"torch\.distributed\.(fsdp|_composable(?!\.contract)|algorithms\._checkpoint)\b",
            TORCH_FSDP,
            id="torch's FSDP",
        ),
        pytest.param(r"torch\.(cuda|accelerator|xpu|mps|mtia)\b", ACCELERATOR | PROGRAMS, id="accelerators"),
        pytest.param(r"torch\b.*\._(?!_)", PRIVATE_TORCH, id="private names"),
    ],
)
def test_seams_of_torch(names: str, allowed: frozenset[str]) -> None:
    found = [
        f"{source.at(line)}: {name}"
        for source in sources()
        if not source.is_one_of(allowed)
        for name, line in sorted(set(source.mentions()), key=lambda mention: mention[1])
        if re.match(names, name)
    ]
    assert not found, f"these belong into {', '.join(sorted(allowed))}:\n" + "\n".join(found)


# Of single features: options of users, and the sources of unsharded parameters that a feature hands down.
OF_FEATURES = frozenset("branch branch_before keep_frozen post_forward_ranks HostCache PostForwardShard".split())


def test_the_runtime_knows_of_no_feature() -> None:
    found = [
        f"{source.at(node.lineno)}: {name}"
        for source in sources()
        if source.unit == "engine/runtime"
        for node in ast.walk(source.tree)
        for name in (getattr(node, kind, None) for kind in ("id", "attr", "name", "arg"))
        if name in OF_FEATURES
    ]
    assert not found, "these belong into engine/features:\n" + "\n".join(found)
    named = {name for source in sources() for name in re.findall(r"\w+", source.path.read_text())}
    assert named >= OF_FEATURES, f"these are called otherwise: {OF_FEATURES - named}"


@pytest.mark.parametrize("folder", ["flatfsdp/engine/schedule", "tests/schedule"])
def test_the_order_is_pure(folder: str) -> None:
    texts = [path.read_text() for path in (PACKAGE.parent / folder).glob("*.py")]
    if folder.startswith("tests"):
        texts = [text for text in texts if "pytest.mark.unit" in text]
    assert len(texts) > 3 and not [text for text in texts if re.search(r"^\s*(import|from) torch\b", text, re.M)]


def test_one_file_registers_with_autograd() -> None:
    registering = re.compile(r"register\w*hook|queue_callback|register_multi_grad_hook")
    found = [
        f"{source.at(node.lineno)}: {node.attr}"
        for source in sources()
        if not source.is_one_of(AUTOGRAD_HOOKS | PROGRAMS)
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Attribute)
        and registering.fullmatch(node.attr)
        # modules' and optimizers' own, with which autograd has nothing to do
        and not re.search("state_dict|_step_", node.attr)
        # base/autograd.py offers functions of such names to the others
        and not (isinstance(node.value, ast.Name) and node.value.id == "hooks")
    ]
    assert not found, "\n".join(found)


def test_one_file_assigns_the_data_of_parameters() -> None:
    """What a parameter shows is decided in one place. Classes that give users' `.data` another meaning set none."""
    found = {
        source.file
        for source in sources()
        if source.file.startswith("engine/")
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Attribute)
        and node.attr == "data"
        and isinstance(node.ctx, ast.Store)
        and not (isinstance(node.value, ast.Name) and node.value.id == "dtensor_class")  # a property of a class
    }
    assert found == {"engine/flat/views"}


def test_faces_are_asked_no_more() -> None:
    """Every difference between faces is a method or a value of theirs, except for these facts: each is named for what
    other files want to know, and they ask no list instead (`test_faces.py`). [Note: faces]"""
    face = next(each for each in sources() if each.file == "engine/flat/faces")
    found = {
        each.target.id
        for node in ast.walk(face.tree)
        if isinstance(node, ast.ClassDef) and node.name in ("Face", "FaceMaker")
        for each in node.body
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
        if isinstance(each.annotation, ast.Name) and each.annotation.id == "bool"
    }
    facts = {"holders_are_leaves", "leaves_are_private", "originals_get_grads"}
    facts |= {"holders_refuse", "shares_holder", "users_swap_holders", "misses_data_writes"}
    assert found == facts | {"computes"}  # a state


def test_only_the_builder_names_faces() -> None:
    """Other files use their classes for messages alone."""
    faces = {node.name for source in sources() for node in ast.walk(source.tree) if is_face(node)}
    assert {"FlatFace", "OriginalFace", "DTensorFace"} < faces
    found = set()
    for source in sources():
        if source.file.startswith("engine/") and not any(map(is_face, ast.walk(source.tree))):
            nodes = [*ast.walk(source.tree)]
            for_words = [each.value for each in nodes if isinstance(each, ast.Attribute) and each.attr == "words"]
            named = [each for each in nodes if isinstance(each, ast.Name) and each.id in faces]
            found |= {source.file for each in named if each not in for_words}
    assert found == {"engine/wrapping/build"}


def is_face(node: ast.AST) -> bool:
    return isinstance(node, ast.ClassDef) and node.name.endswith("Face") and node.name != "Face"


# Functions that finish an iteration. The door and the drivers call them; all others use the door. [Note: rest]
PIECES_OF_REST = re.compile(
    r"\b(\w+\.(lazy_init|finish_interrupted|wait_for_gradients|show_shards|shows_shards|reset_to_idle"
    r"|retire_requests|left_unreduced)|setup\.take_over|iteration\.close|limiter\.free_all)$"
)
DOOR = {"engine/models/rest", *(f"engine/runtime/{file}" for file in ("iteration", "forward_driver", "backward_hooks"))}


def test_what_works_between_iterations_goes_through_quiesce() -> None:
    found = [
        f"{source.at(node.lineno)}: {ast.unparse(node)}"
        for source in sources()
        if source.file not in DOOR
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Attribute) and PIECES_OF_REST.search(ast.unparse(node))
    ]
    assert not found, "these come through engine/models/rest.py:\n" + "\n".join(found)


def test_memory_is_given_back_by_its_stream_and_never_by_record_stream() -> None:
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
        ("from . import layout", "api", "flatfsdp", "layout"),
        ("from ...api import Config", "engine/schedule/issue_order", "flatfsdp.api", "Config"),
        ("import torch.nn.functional as F", "api", "torch.nn.functional", ""),
    ],
)
def test_the_reader_understands_imports(text: str, unit: str, module: str, name: str) -> None:
    (found,) = Source(PACKAGE / f"{unit}.py", ast.parse(text)).imports()
    assert (found.module, found.name) == (module, name)


def test_the_reader_sees_through_aliases() -> None:
    text = (
        "import torch, torch.distributed as dist\nfrom torch import nn, _C\ndist._x\nnn.a._b\ntorch.cuda.c()\nlocal.d"
    )
    found = {name for name, _ in Source(PACKAGE / "api.py", ast.parse(text)).mentions()}
    assert {"torch.distributed._x", "torch.nn.a._b", "torch.cuda.c", "torch._C"} <= found
    assert not any("local" in name for name in found)


# --- the trainer, inside ----------------------------------------------------------------------------------------------

# Its parts (a folder is one), each importing from earlier rows and its own.
TRAINER_ROWS = (
    "process_group settings preemption terminal randomness rendezvous",
    "arguments launch",
    "muon",
    "optimizers model data_loading utilization",
    "hub",
    "instantiate",
    "objectives fused_loss state memory_estimate",
    "gradients",
    "run",
    "callbacks",
    "loop watching",
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
            if TRAINER_ROW_OF.get(other, -1) > TRAINER_ROW_OF.get(part, -1):
                upwards.append(f"{source.at(each.line)} ({part}) imports {other}")
    assert not upwards, "\n".join(upwards)


def test_every_part_of_the_trainer_has_a_row() -> None:
    parts = {path.stem for path in (PACKAGE / "trainer").iterdir() if path.suffix in ("", ".py")} - {"__pycache__"}
    assert parts == TRAINER_ROW_OF.keys()
