"""The program of `tools/train`: prints a line about the run before it imports torch, which takes seconds.

In the meantime, Ctrl-C ends it with a message and the exit code for SIGINT. All else is up to `flatfsdp.train`,
including wrong options: options that are not understood here are left out of the line.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

QUIET = ("--help", "-h", "--dry-run", "--export", "--generate")  # train nothing
DEFAULTS = {"layers": 2, "width": 128}
DEVICES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")  # without one of these torch finds no GPU


def announcement(arguments: Sequence[str]) -> str:
    """The line; "" where nothing will be trained."""
    flags = [each.partition("=")[0] for each in arguments]
    if any(each in flags for each in QUIET):
        return ""
    given: dict[str, Any] = DEFAULTS | _from_file(arguments, flags)
    for name in ("ranks", "device", "text", "model", "layers", "width"):
        given |= _value_of(name, arguments, flags)
    where = _ranks(given.get("ranks"), given.get("device", "auto"))
    if "model" in given:
        return f"starting {where}; model: {given['model']}"
    text = given.get("text", "Python's library")
    blocks = "1 block" if str(given["layers"]) == "1" else f"{given['layers']} blocks"
    return f"starting {where}; text: {text}; model: {blocks} of width {given['width']}"


def _ranks(ranks: Any, device: str) -> str:
    if device == "auto" and any(map(os.path.exists, DEVICES)):
        return f"{ranks} ranks" if ranks else "ranks, one per GPU"
    count = ranks or (2 if device in ("auto", "cpu") else "one per device:")
    return f"{count} rank{'' if str(count) == '1' else 's'} on {'CPU' if device in ('auto', 'cpu') else device}"


def _value_of(name: str, arguments: Sequence[str], flags: Sequence[str]) -> dict[str, str]:
    """The last value of a flag, in either form; empty where it was not given."""
    found = {}
    for place, flag in enumerate(flags):
        if flag == f"--{name}":
            following = arguments[place + 1 : place + 2]
            values = [arguments[place].partition("=")[2]] if "=" in arguments[place] else following
            found |= dict.fromkeys([name] * len(values), *values)
    return found


def _from_file(arguments: Sequence[str], flags: Sequence[str]) -> dict[str, Any]:
    """The contents of a --config file; empty where it cannot be read: that is reported later."""
    path = _value_of("config", arguments, flags).get("config")
    if path is None:
        return {}
    try:
        if path.endswith(".json"):
            tables = json.loads(Path(path).read_text())
        else:
            import tomllib

            tables = tomllib.loads(Path(path).read_text())
        return {name: value for table in tables.values() for name, value in table.items()}
    except (OSError, ValueError, AttributeError, ImportError):
        return {}


def _interrupted(number: int, frame: object) -> NoReturn:
    print("stopped by SIGINT before training began", file=sys.stderr, flush=True)
    os._exit(128 + number)  # immediately: an exception in the middle of an import may be raised as another one


def main() -> int:
    """Announce, import, train."""
    listens = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if listens:
        signal.signal(signal.SIGINT, _interrupted)
    line = announcement(sys.argv[1:])
    if line:
        print(f"{line}\n", end="", file=sys.stderr, flush=True)  # in one write: a terminal may show a ^C
    sys.path[0] = os.getcwd()  # as with -m: user-defined models are imported from here
    from flatfsdp.train import main as train

    return train(program="tools/train", announced=True)


if __name__ == "__main__":
    sys.exit(main())
