"""The findings of a part, written to a file one by one: a part that is ended early leaves its findings so far."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

WORST = 400  # characters of an error in a row


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        goal: the goal; "" for a figure without one.
        met: None where there is no goal, or where this machine cannot decide it.
    """

    what: str
    goal: str
    found: str
    met: bool | None


@dataclass(frozen=True)
class Table:
    """Figures side by side."""

    title: str
    header: list[str]
    rows: list[list[str]]


@dataclass
class Findings:
    """All findings of one part so far.

    Attributes:
        figures: numbers for further computation.
        errors: full tracebacks, by the row that they belong to.
    """

    rows: list[Row] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)

    @staticmethod
    def read(path: Path) -> Findings:
        """Read the findings at `path`; empty without a file."""
        if not path.exists():
            return Findings()
        found = json.loads(path.read_text())
        rows, tables = [Row(**row) for row in found["rows"]], [Table(**table) for table in found["tables"]]
        return Findings(rows, tables, found["figures"], found["errors"])


class Report:
    """The findings of one part, in a file.

    Attributes:
        folder: the folder for files of the part.
    """

    def __init__(self, path: Path, folder: Path | None = None) -> None:
        self.path, self.folder = path, path.parent if folder is None else folder
        self.found = Findings.read(path)

    def goal(self, what: str, goal: str, found: str, met: bool | None) -> None:
        """Add a row with a ``goal`` and its measurement ``found``."""
        self._add(Row(what, goal, found, met))

    def figure(self, what: str, found: str) -> None:
        """Add a row for a measurement without a goal."""
        self._add(Row(what, "", found, None))

    def table(self, title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Add figures side by side, replacing an earlier table with that title."""
        self.found.tables = [table for table in self.found.tables if table.title != title]
        self.found.tables.append(Table(title, list(header), [list(row) for row in rows]))
        self._write()

    def numbers(self, name: str, value: Any) -> None:
        """Add plain data, for the JSON only."""
        self.found.figures[name] = value
        self._write()

    def failed(self, what: str, goal: str, error: BaseException) -> None:
        """Add a row for an exception of ``what``."""
        self.found.errors[what] = "".join(traceback.format_exception(error))
        last = f"{type(error).__name__}: {error}".strip().replace("\n", " ")
        self._add(Row(what, goal, last[-WORST:], False if goal else None))

    def reload(self) -> None:
        """Read the file again, after another process has written to it."""
        self.found = Findings.read(self.path)

    def _add(self, row: Row) -> None:
        self.found.rows.append(row)
        sign = {True: "ok  ", False: "FAIL", None: "    "}[row.met]
        print(f"{sign} {row.what}: {row.found}" + (f" (goal: {row.goal})" if row.goal else ""), flush=True)
        self._write()

    def _write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        fresh = self.path.with_suffix(f".{os.getpid()}")
        fresh.write_text(json.dumps(asdict(self.found)))
        fresh.rename(self.path)  # atomic: the runner may be reading it
