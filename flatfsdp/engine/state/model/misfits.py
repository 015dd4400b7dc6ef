"""A state dict of another model: torch names every key, on every rank; what that comes to fits on a screen."""

from __future__ import annotations

import re

_BEGIN = "Error(s) in loading state_dict for "
_MOST = 3  # names of a kind
_LIST = re.compile(r"^(\t(?:Missing|Unexpected) key\(s\) in state_dict: )(.*?)\. ?$")
_NAME = re.compile(r'"[^"]*"')


def in_brief(error: RuntimeError) -> RuntimeError | None:
    """`error` with some names of each kind, where torch says that a state dict does not fit; None if it is as short, or
    says something else."""
    reported = str(error)
    if type(error) is not RuntimeError or not reported.startswith(_BEGIN):
        return None
    first, *lines = reported.split("\n")
    kept: list[str] = []
    shapes = 0
    for line in lines:
        if line.startswith("\tsize mismatch for "):
            shapes += 1
            kept += [line] if shapes <= _MOST else []
        elif (found := _LIST.match(line)) is not None and len(names := _NAME.findall(found[2])) > _MOST + 1:
            kept.append(f"{found[1]}{', '.join(names[:_MOST])} and {len(names) - _MOST} more. ")
        else:
            kept.append(line)
    if shapes > _MOST:
        kept.append(f"\tand {shapes - _MOST} more of other shapes. ")
    short = "\n".join([first, *kept])
    if len(short) == len(reported):
        return None
    return RuntimeError(f"{short}\n\tIt is of another model; strict=False returns the names of all keys.")
