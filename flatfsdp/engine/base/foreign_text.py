"""Text that other processes wrote into the store: parsed as plain data, and fit to be printed.

[Note: trust] Whoever reaches the port of the store can write to it, and a key may hold anything. What is read there is
never unpickled and never evaluated: it is JSON of a known shape, or nothing. A string in it takes one line on a
terminal, without control characters, or it could look like words of another rank.
"""

from __future__ import annotations

import json
from typing import Any

LONGEST = 4000  # characters of a text that are shown
DEEPEST = 8  # levels of lists and dicts that any note of ours has at most


def one_line(text: str) -> str:
    """`text` on one line: white space as single spaces, what cannot be printed as escapes, and not too long."""
    if len(text) > LONGEST:
        text = f"{text[:LONGEST]} ..."
    if text.isprintable() and "  " not in text:
        return text
    return "".join(each if each.isprintable() else _escaped(each) for each in " ".join(text.split()))


def parse(text: str | None) -> Any:
    """The JSON value that `text` is, its strings on one line each; None where it is none, or no finite number."""
    if text is None:
        return None
    try:
        return _plain(json.loads(text, parse_constant=_refuse), DEEPEST)
    except (ValueError, RecursionError):
        return None


def _plain(value: Any, depth: int) -> Any:
    if isinstance(value, str):
        return one_line(value)
    if isinstance(value, float) and value - value != 0:
        raise ValueError(value)
    if isinstance(value, (list, dict)) and not depth:
        raise ValueError("too deep")
    if isinstance(value, list):
        return [_plain(each, depth - 1) for each in value]
    if isinstance(value, dict):
        return {one_line(key): _plain(each, depth - 1) for key, each in value.items()}
    return value


def _refuse(constant: str) -> None:
    raise ValueError(constant)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode()
