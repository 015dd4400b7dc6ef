"""Text that other processes wrote into the store: parsed as plain data, and sanitized for printing.

[Note: trust] Any process that can reach the port of the store can write to it, so a key may hold anything. Values from
the store are never unpickled or evaluated: they are JSON with a known structure, or ignored. Strings in them are
reduced to one line without control characters, so that they cannot imitate the output of another rank.
"""

from __future__ import annotations

import json
from typing import Any

LONGEST = 4000  # characters of a text that are printed
DEEPEST = 8  # the most levels of lists and dicts in a note


def one_line(text: str) -> str:
    """`text` on one line: white space as single spaces, nonprintable characters escaped, cut at `LONGEST`."""
    if len(text) > LONGEST:
        text = f"{text[:LONGEST]} ..."
    if text.isprintable() and "  " not in text:
        return text
    return "".join(each if each.isprintable() else _escaped(each) for each in " ".join(text.split()))


def parse(text: str | None) -> Any:
    """The JSON value of `text`, with each string on one line; None if it is not JSON, or has nonfinite numbers."""
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
