"""The table of shared memory, from the numbers of its parts."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from .engines import BASE, ENGINES, TRUTH
from .pages import BEFORE, REST, STEPS, WATCHED
from .rounds import Cell
from .rows import Timings
from .statistics import Spread, paired_ratio
from .table import MIB, load_lines, machine_line, markdown, spread_of

# Goals for the cost of steps: by comparison, engine, cost and its divisor, the largest ratio.
GOALS = (
    ("gpt, FULL_SHARD, 2 ranks", "flatfsdp", "step", BASE, 0.55),
    ("gpt, FULL_SHARD, 2 ranks", "flatfsdp", "step", TRUTH, 0.75),
    ("gpt, FULL_SHARD, 2 ranks", "flatfsdp", "cpu", BASE, 0.60),
    ("experts, FULL_SHARD, 2 ranks", "flatfsdp", "step", BASE, 0.50),
    ("mlp8x, FULL_SHARD, 2 ranks", "flatfsdp", "step", BASE, 0.50),
    ("small, FULL_SHARD, 2 ranks", "flatfsdp", "step", BASE, 0.20),
    ("gpt, FULL_SHARD, 2 ranks", "flatfsdp-kept", "faults", None, 100),
)
_COSTS = {"step": "step, wall clock", "cpu": "step, CPU time of a rank", "faults": "page faults per step"}


def render(parts: dict[str, Cell]) -> str:
    """All tables that the parts have data for."""
    lines = [
        "# Through memory that ranks share",
        "",
        "Ranks of gloo on one machine, one thread each; every measurement in fresh processes. Engines take turns in",
        f"a round; times are medians over rounds [lowest to highest], ratios are to {ENGINES[BASE].title} and to",
        f"{ENGINES[TRUTH].title} in the same round. A row whose losses are not those of {ENGINES[TRUTH].title} in its",
        "round is invalid. Loopback: what all ranks together send per step through local sockets, and whatever else",
        "the machine sends there meanwhile. Parts were measured separately; each has its date and the machine's load.",
        "The limit is one rank's arithmetic and the bare exchange by gloo's messages. Page faults: of the mean rank.",
        "Settings: `tools/benchmark/engines.py`; parts: `tools/benchmark/shared_memory.py`.",
        "",
    ]
    lines += _goals([cell for results in parts.values() for cell in results["cells"]])
    for name, results in parts.items():
        lines += [f"## {name}", "", machine_line(results["machine"]), ""]
        lines += [f"Made by `{results['machine']['command']}`.", "", *load_lines(results["load"])]
        for title in dict.fromkeys(cell["model"] for cell in results["cells"]):
            lines += [f"### {title}", "", *_times(results["cells"], title)]
        for title in dict.fromkeys(cell["model"] for cell in results["pages"]):
            lines += [f"### {title}: memory", "", *_pages(results["pages"], title)]
    return "\n".join(lines).rstrip() + "\n"


def _goals(cells: Sequence[Cell]) -> list[str]:
    rows = []
    for title, engine, cost, base, most in GOALS:
        timings = Timings(cells, title)
        if engine not in timings.engines or any(timings.failure(name) for name in (engine, base) if name):
            continue
        values = timings.values(engine, cost)
        found = paired_ratio(values, timings.values(base, cost)) if base else Spread.of(values)
        what = f"{_COSTS[cost]}, to {ENGINES[base].title}" if base else _COSTS[cost]
        form = ".2f" if base else ",.0f"
        verdict = "met" if found.median <= most else "**not met**"
        rows.append([title, ENGINES[engine].title, what, f"{most:g}", spread_of(found, 1, form), verdict])
    lines = markdown(("comparison", "engine", "cost", "goal", "found", ""), rows)
    return ["## Goals", "", *lines] if lines else []


def _times(cells: Sequence[Cell], title: str) -> list[str]:
    timings = Timings(cells, title)
    rows, failures = [], []
    for engine in timings.engines:
        name, failure = ENGINES[engine].title, timings.failure(engine)
        if failure is not None:
            failures.append(f"- {name}: {failure}")
            rows.append([name, *["invalid"] * 8])
            continue
        ratios = {
            base: {
                cost: paired_ratio(timings.values(engine, cost), timings.values(base, cost)) for cost in ("step", "cpu")
            }
            for base in (BASE, TRUTH)
            if base in timings.engines and timings.failure(base) is None
        }
        row, sent = timings.row(engine), [cell["ranks"][0]["loopback"] for cell in timings.cells_of(engine)]
        limits = (f"{row[key].median:.2f}" if key in row else "-" for key in ("step limit", "cpu limit"))
        rows.append(
            [
                name,
                spread_of(row["step"], 1000, ".0f"),
                *(spread_of(ratios.get(base, {}).get("step"), 1, ".2f") for base in (BASE, TRUTH)),
                spread_of(row["cpu"], 1000, ".0f"),
                *(spread_of(ratios.get(base, {}).get("cpu"), 1, ".2f") for base in (BASE,)),
                " / ".join(limits),
                f"{row['faults'].median:,.0f}",
                f"{median(sent) / MIB:.2f}",
            ]
        )
    header = ("engine", "step ms", f"to {ENGINES[BASE].title}", f"to {ENGINES[TRUTH].title}", "CPU ms per rank",
              f"CPU to {ENGINES[BASE].title}", "step, CPU / limit", "page faults per step", "loopback MiB")  # fmt: skip
    return markdown(header, rows) + (["Not comparable:", "", *failures, ""] if failures else [])


def _pages(cells: Sequence[Cell], title: str) -> list[str]:
    """Megabytes per rank, medians over rounds."""
    lines = [
        "MiB per rank, medians over rounds. *PSS*: that of `smaps_rollup`, where a page that ranks share counts once",
        "over all of them. *Charge*: that of the job's control group. Both less what they were before the model was",
        "made, at the most of many looks during steps, and at rest behind them. Live tensors and the engine's ledger",
        "are exact, and so is the peak of these and a rank's outboxes together. Outboxes are in PSS and charge, too.",
        "*Of no file*: of the PSS, without code; beside it with what sockets buffer, which is the system's: a control",
        "group of version 2 is charged for it. What tensors take goes back to the system as soon as they let go of it,",
        "or what glibc keeps would be most of a difference.",
        "",
    ]
    rows, notes = [], []
    for engine in [name for name in ENGINES if any((c["engine"], c["model"]) == (name, title) for c in cells)]:
        mine = [c for c in cells if (c["engine"], c["model"]) == (engine, title)]
        if failed := [c["error"].strip().splitlines()[-1] for c in mine if "error" in c]:
            rows.append([ENGINES[engine].title, *["failed"] * 13])
            notes.append(f"- {ENGINES[engine].title}: {failed[0]}")
            continue
        ranks = len(mine[0]["ranks"])
        first = [cell["ranks"][0] for cell in mine]

        def above(kind: str, phase: str, which: str, first: list[Any] = first, ranks: int = ranks) -> str:
            """The value in `phase`, above the level before."""
            if any(kind not in one["phases"][phase]["last"] for one in first):
                return "not readable"
            grown = [_of(one, kind, phase, which) - _of(one, kind, BEFORE, "last") for one in first]
            return f"{median(grown) / ranks / MIB:.1f}"

        def figure(name: str, first: list[Any] = first) -> str:
            values = [one[name] for one in first if one.get(name) is not None]
            return f"{median(values) / MIB:.1f}" if values else "-"

        shared = median(_of(one, "pss shared", REST, "last") for one in first) / ranks / MIB
        rows.append(
            [
                ENGINES[engine].title,
                *(figure(name) for name in ("ledger peak", "live peak", "live and outboxes peak", "live held")),
                *(above("pss", phase, which) for phase, which in ((STEPS, "most"), (REST, "last"))),
                f"{shared:.1f}",
                *(above(name, STEPS, "most") for name in ("pss of no file", "of no file, and sockets")),
                *(above("charge", phase, which) for phase, which in ((STEPS, "most"), (REST, "last"))),
                figure("posted"),
                f"{median(one['phases'][STEPS]['count'] for one in first) / WATCHED:.0f}",
            ]
        )
    header = ("engine", "ledger's peak", "live tensors, peak", "with outboxes", "held", "PSS, peak", "at rest",
              "shared in it", "of no file, peak", "and sockets'",
              "charge, peak", "at rest", "through outboxes per step", "looks per step")  # fmt: skip
    return [*lines, *markdown(header, rows), *notes, *([""] if notes else [])]


def _of(found: Cell, kind: str, phase: str, which: str) -> int:
    size: int = found["phases"][phase][which][kind]
    return size
