"""A program in a terminal, and its output as shown on a screen."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import termios
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from select import select

CONTROL_C = b"\x03"
ROWS = 24


@dataclass(frozen=True)
class Shown:
    """The result of a program.

    Attributes:
        code: its exit code.
        first: seconds until its first output.
        lines: its output, as shown on a screen without an end; a line that wrapped is several.
        wrapped: the number of lines that wrapped.
    """

    code: int
    first: float
    lines: list[str]
    wrapped: int


def run_in_terminal(
    command: Sequence[str | Path],
    *,
    columns: int,
    folder: Path,
    environment: Mapping[str, str],
    interrupt_at: str = "",
    after: float = 0.0,
    limit: float = 240.0,
) -> Shown:
    """Run `command` in a terminal of `columns`. Ctrl-C is sent once, `after` seconds after `interrupt_at` appears."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, columns, 0, 0))

    def take_terminal() -> None:
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    started = time.monotonic()
    process = subprocess.Popen(
        [str(each) for each in command],
        cwd=folder,
        env=dict(environment),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        preexec_fn=take_terminal,
    )
    os.close(theirs)
    written, first, due = b"", 0.0, None if interrupt_at else float("inf")
    try:
        while time.monotonic() < started + limit:
            if due is None and interrupt_at.encode() in written:
                due = time.monotonic() + after
            if due is not None and time.monotonic() >= due:
                os.write(ours, CONTROL_C)
                due = float("inf")
            if select([ours], [], [], 0.05)[0]:
                try:
                    data = os.read(ours, 2**16)
                except OSError:  # no process has it open any more
                    break
                first = first or time.monotonic() - started
                written += data
        code = process.wait(max(0.0, started + limit - time.monotonic()))
    finally:
        process.kill()
        os.close(ours)
    lines, wrapped = on_screen(written.decode(errors="replace"), columns)
    return Shown(code, first, lines, wrapped)


def on_screen(text: str, columns: int) -> tuple[list[str], int]:
    """The lines that `text` leaves on a screen that is `columns` wide, and the number of wraps."""
    rows: list[list[str]] = [[]]
    row = column = wrapped = 0
    for part in text.replace("\x1b[A", "\v"):
        if part == "\r":
            column = 0
        elif part == "\v":
            row = max(0, row - 1)
        else:
            if part == "\n" or column == columns:
                row, wrapped = row + 1, wrapped + (part != "\n")
                column = column if part == "\n" else 0
            if row == len(rows):
                rows.append([])
            if part != "\n":
                rows[row] += " " * (column + 1 - len(rows[row]))
                rows[row][column] = part
                column += 1
    return ["".join(each).rstrip() for each in rows], wrapped
