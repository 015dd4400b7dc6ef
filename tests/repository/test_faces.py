"""Parameters at rest depend on the face of their handle, and one place, at construction, chooses the face."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

ENGINE = Path(__file__).resolve().parents[2] / "flatfsdp" / "engine"
ARGUMENT = "use_orig_params"
# The file that checks the argument, and the one that picks a face for it.
ASKS = ("config/arguments", "wrapping/build")
# The file whose messages name it: messages elsewhere take the text from the face.
NAMES = ("flat/faces",)


def asked(tree: ast.AST) -> bool:
    """Whether the code reads, takes or passes something of that name."""
    names = {each.attr for each in ast.walk(tree) if isinstance(each, ast.Attribute)}
    names |= {each.id for each in ast.walk(tree) if isinstance(each, ast.Name)}
    names |= {each.arg for each in ast.walk(tree) if isinstance(each, ast.arg | ast.keyword) and each.arg}
    return ARGUMENT in names


def named(tree: ast.AST) -> bool:
    """Whether a string that is no docstring has the name."""
    texts = {id(each.value) for each in ast.walk(tree) if isinstance(each, ast.Expr)}
    strings = (each for each in ast.walk(tree) if isinstance(each, ast.Constant) and id(each) not in texts)
    return any(isinstance(each.value, str) and ARGUMENT in each.value for each in strings)


def test_no_other_file_checks_which_face_it_is() -> None:
    paths = sorted(ENGINE.rglob("*.py"))
    texts = {path.relative_to(ENGINE).with_suffix("").as_posix(): path.read_text() for path in paths}
    trees = {name: ast.parse(text) for name, text in texts.items() if ARGUMENT in text}
    for found, files in ((asked, ASKS), (named, NAMES)):
        assert {name for name, tree in trees.items() if found(tree)} <= {*files}, found


FACES = ("flat/faces", "flat/paired_face", "flat/piece_face", "dtensor/dtensor_face")
# Where flat parameters are made, found to be of no unit, and refused if they are wrapped again.
KNOW = ("flat/flat_param", "models/param_registry", "wrapping/build")


def asks_for_flat(tree: ast.AST) -> Iterator[ast.AST]:
    """The places where the code compares a class with that of flat parameters, or asks for FSDP1's mark of these."""
    for each in ast.walk(tree):
        match each:
            case ast.Call(func=ast.Name(id="isinstance" | "issubclass"), args=[_, kinds]):
                found = any(isinstance(kind, ast.Name) and kind.id == "FlatParameter" for kind in ast.walk(kinds))
            case ast.Compare():
                found = "FlatParameter" in ast.unparse(each) and "type(" in ast.unparse(each)
            case ast.Attribute(attr="_fsdp_flattened") | ast.Constant(value="_fsdp_flattened"):
                found = True
            case _:
                found = False
        if found:
            yield each


def test_no_other_file_asks_whether_a_parameter_is_a_flat_one() -> None:
    found = {
        path.relative_to(ENGINE).with_suffix("").as_posix(): ast.unparse(each)
        for path in sorted(ENGINE.rglob("*.py"))
        for each in asks_for_flat(ast.parse(path.read_text()))
    }
    assert found.keys() == {*KNOW}, f"ask the face (`shares_holder`), or whose parameter it is (`owner_of`): {found}"


def lists_of_faces() -> set[str]:
    """The attributes of faces that are lists, empty for some of them."""
    tree = ast.parse((ENGINE / "flat/faces.py").read_text())
    face = next(each for each in tree.body if isinstance(each, ast.ClassDef) and each.name == "Face")
    fields = [each for each in face.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)]
    return {
        each.target.id
        for each in fields
        if isinstance(each.target, ast.Name) and ast.unparse(each.annotation).startswith(("Sequence", "list"))
    }


def conditions(tree: ast.AST) -> Iterator[ast.expr]:
    """The expressions of whose values the code asks whether they are true."""
    asked: list[ast.expr] = []
    for each in ast.walk(tree):
        match each:
            case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test) | ast.Assert(test=test):
                asked.append(test)
            case ast.comprehension(ifs=ifs):
                asked += ifs
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                asked.append(operand)
            case ast.BoolOp(values=values):
                asked += values
            case ast.Call(
                func=ast.Name(id="bool" | "any" | "all"), args=[ast.GeneratorExp() | ast.ListComp() as found]
            ):
                asked.append(found.elt)
            case ast.Call(func=ast.Name(id="bool"), args=args):
                asked += args
    for each in asked:
        yield each.value if isinstance(each, ast.NamedExpr) else each


def test_no_other_file_asks_whether_a_list_of_a_face_is_empty() -> None:
    lists = lists_of_faces()
    assert {"holders", "showing", "counters"} <= lists
    found = [
        f"{path.relative_to(ENGINE)}:{each.lineno}: {ast.unparse(each)}"
        for path in sorted(ENGINE.rglob("*.py"))
        if path.relative_to(ENGINE).with_suffix("").as_posix() not in FACES
        for each in conditions(ast.parse(path.read_text()))
        if isinstance(each, ast.Attribute) and each.attr in lists and "face" in ast.unparse(each.value)
    ]
    assert not found, f"let the face have a fact that says what is wanted, such as `holders_are_leaves`: {found}"
