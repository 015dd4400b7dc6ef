"""The findings of all parts: as JSON, and as tables in Markdown, with a row for each goal."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .runner import Outcome

WORDS = {True: "yes", False: "**no**", None: "-"}


def write(folder: Path, machine: dict[str, Any], outcomes: Sequence[Outcome]) -> None:
    """Write `results.json` and `results.md`, replacing earlier ones."""
    folder.mkdir(parents=True, exist_ok=True)
    whole = {"machine": machine, "parts": [outcome.to_json() for outcome in outcomes]}
    for name, text in (("results.json", json.dumps(whole, indent=1) + "\n"), ("results.md", render(machine, outcomes))):
        fresh = folder / f".{name}"
        fresh.write_text(text)
        fresh.rename(folder / name)


def render(machine: dict[str, Any], outcomes: Sequence[Outcome]) -> str:
    """The tables as Markdown."""
    about = ", ".join(
        f"{name} {machine[name]}"
        for name in ("commit", "torch", "cuda", "nccl", "driver", "python")
        if machine.get(name)
    )
    rows = [row for outcome in outcomes for row in outcome.found.rows]
    counts = {met: sum(row.met is met and bool(row.goal) for row in rows) for met in (True, False, None)}
    lines = [
        "# flatfsdp on an accelerator",
        "",
        f"{machine['date']}, {machine['device']}, {about}. Made by `{machine['command']}`.",
        "",
        f"{counts[True]} goals are met, {counts[False]} are not, {counts[None]} could not be looked at.",
        "",
    ]
    for outcome in outcomes:
        lines += [f"## {outcome.title}", "", f"`{outcome.part}`, {outcome.seconds:.0f} s.", ""]
        lines += _markdown(
            ("what", "goal", "found", "met"),
            [(row.what, row.goal or "-", row.found, WORDS[row.met]) for row in outcome.found.rows],
        )
        for table in outcome.found.tables:
            lines += [f"### {table.title}", "", *_markdown(table.header, table.rows)]
    return "\n".join(lines).rstrip() + "\n"


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    if not rows:
        return []
    body = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    return [f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *body)] + [""]
