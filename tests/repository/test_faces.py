"""Parameters at rest depend on the face of their handle, and one place, at construction, chooses the face."""

from __future__ import annotations

import ast
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
