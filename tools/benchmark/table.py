"""The results as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .engines import BASE, ENGINES, TRUTH
from .machine import QUIET
from .rows import Timings, figures_row
from .statistics import Spread

MIB = 2**20


def render(results: dict[str, Any]) -> str:
    """All tables that the results have data for."""
    lines = [*_head(results["machine"]), *_load(results.get("load", []))]
    for model in results.get("models", []):
        lines += [f"## {model['name']}", "", _model_line(model), ""]
        lines += _timings(results["cells"], model["name"]) + _figures(results.get("figures", []), model["name"])
    return "\n".join(lines).rstrip() + "\n"


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table, with an empty line behind it; none without rows."""
    if not rows:
        return []
    return [_line(header), _line(["---"] * len(header)), *map(_line, rows), ""]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _head(machine: dict[str, Any]) -> list[str]:
    return [
        "# flatfsdp beside other engines",
        "",
        f"{machine['date']}, commit {machine['commit']}, torch {machine['torch']}, Python {machine['python']}; "
        f"{machine['cores']} cores of {machine['cpu']}, {machine['memory_gib']} GiB, device {machine['device']}.",
        "",
        f"Made by `{machine['command']}`. Times are medians over rounds [lowest to highest]; ratios are to {BASE} in "
        f"the same round; a row whose losses are not those of {TRUTH} in its round is invalid. The limit is, of wall "
        "clock, the longer of one rank's arithmetic and the bare exchange, of CPU time their sum. Settings: "
        "`tools/benchmark/engines.py`; models: `tools/benchmark/models.py`.",
        "",
    ]


def _load(loads: Sequence[dict[str, Any]]) -> list[str]:
    rows = []
    for number, load in enumerate(loads):
        averages = (f"{load[moment]:.2f}" for moment in ("before", "after"))
        rows.append([str(number), *averages, f"{load['others']:.0%}", "" if load["quiet"] else "**disturbed**"])
    loud = [row for row in rows if row[-1]]
    warning = [
        f"**The machine was not quiet**: in {len(loud)} of {len(rows)} rounds other programs used over {QUIET:.0%} of "
        "the cores. Times of these rounds say little; ratios say more; counts and bytes are exact all the same.",
        "",
    ]
    header = ("round", "load average before", "after", "used by others", "")
    return (warning if loud else []) + markdown(header, rows)


def _model_line(model: dict[str, Any]) -> str:
    sizes = model["unit_bytes"]
    return f"{len(sizes)} units (the root's last, where it owns parameters), {sum(sizes) / MIB:.1f} MiB of parameters."


def _timings(cells: Sequence[dict[str, Any]], model: str) -> list[str]:
    timings = Timings(cells, model)
    rows, failures = [], []
    for engine in timings.engines:
        row = timings.row(engine)
        title = ENGINES[engine].title
        if "failure" in row:
            failures += [f"- {title}: {row['failure']}"]
            rows.append([title, *["invalid"] * 10])
            continue
        rows.append(
            [
                title,
                *(f"{1000 * row[phase].median:.0f}" for phase in ("forward", "backward", "optimizer")),
                _spread(row["step"], 1000, ".0f"),
                _spread(row.get("step ratio"), 1, ".2f"),
                _spread(row["cpu"], 1000, ".0f"),
                _spread(row.get("cpu ratio"), 1, ".2f"),
                " / ".join(f"{row[key].median:.2f}" if key in row else "-" for key in ("step limit", "cpu limit")),
                f"{row['faults'].median:,.0f}",
                f"{row['resident'] / MIB:.0f}",
            ]
        )
    header = ("engine", "forward ms", "backward ms", "optimizer ms", "step ms", "step ratio", "CPU ms per rank",
              "CPU ratio", "step, CPU / limit", "page faults per step", "peak resident MiB")  # fmt: skip
    return markdown(header, rows) + (["Not comparable:", "", *failures, ""] if failures else [])


def _figures(cells: Sequence[dict[str, Any]], model: str) -> list[str]:
    rows = []
    for engine, definition in ENGINES.items():
        row = figures_row(cells, model, engine)
        if row:
            rows.append(
                [
                    definition.title,
                    _by_strategy(row["peak"]),
                    _by_strategy(row["held"]),
                    ", ".join(f"{count} {kind}" for kind, count in row["calls"].items()) or "none",
                    *(
                        f"{row[key] / MIB:.1f}" if key in row else "-"
                        for key in ("sent", "copied forward", "copied backward", "own slot", "scaled")
                    ),
                ]
            )
    header = ("engine", "peak MiB, FULL_SHARD / SHARD_GRAD_OP", "held MiB", "collectives per step", "MiB sent",
              "MiB copied in forward", "in backward", "into the own slot", "MiB scaled")  # fmt: skip
    return markdown(header, rows)


def _by_strategy(values: dict[str, list[int | None]]) -> str:
    """One figure for each strategy, that of the fourth step; both where the third was different."""

    def one(steps: list[int | None]) -> str:
        return " then ".join(dict.fromkeys("-" if step is None else f"{step / MIB:.1f}" for step in steps))

    return " / ".join(map(one, values.values()))


def _spread(spread: Spread | None, factor: float, form: str) -> str:
    if spread is None:
        return "-"
    middle, low, high = (format(factor * value, form) for value in spread)
    return middle if low == high else f"{middle} [{low} to {high}]"
