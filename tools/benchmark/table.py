"""The results as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .engines import BASE, ENGINES, TRUTH
from .machine import QUIET
from .rows import Timings, figures_row, host_row
from .statistics import Spread

MIB = 2**20


def render(results: dict[str, Any]) -> str:
    """All tables that the results have data for."""
    lines = [*_head(results["machine"]), *load_lines(results.get("load", []))]
    for model in results.get("models", []):
        lines += [f"## {model['name']}", "", _model_line(model), ""]
        lines += _timings(results["cells"], model["name"]) + _figures(results.get("figures", []), model["name"])
        lines += _gpu(results.get("figures", []), model["name"])
        lines += _failed(results.get("figures", []), model["name"])
    lines += _host(results.get("host", []))
    for title, models in results.get("sweeps", {}).items():
        lines += _sweep(results["cells"], title, models)
    return "\n".join(lines).rstrip() + "\n"


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table, followed by an empty line; nothing without rows."""
    if not rows:
        return []
    return [_line(header), _line(["---"] * len(header)), *map(_line, rows), ""]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def machine_line(machine: dict[str, Any]) -> str:
    """The date, the commit and the machine of a measurement."""
    return (
        f"{machine['date']}, commit {machine['commit']}, torch {machine['torch']}, Python {machine['python']}; "
        f"{machine['cores']} cores of {machine['cpu']}, {machine['memory_gib']} GiB, device {machine['device']}."
    )


def _head(machine: dict[str, Any]) -> list[str]:
    return [
        "# flatfsdp beside other engines",
        "",
        machine_line(machine),
        "",
        f"Made by `{machine['command']}`. Times are medians over rounds [lowest to highest]; ratios are to {BASE} in "
        f"the same round; a row whose losses are not those of {TRUTH} in its round is invalid. The limit is, of wall "
        "clock, the longer of one rank's arithmetic and the bare exchange, of CPU time their sum. Settings: "
        "`tools/benchmark/engines.py`; models: `tools/benchmark/models.py`.",
        "",
    ]


def load_lines(loads: Sequence[dict[str, Any]]) -> list[str]:
    """The other load of the machine in each round."""
    rows = []
    for number, load in enumerate(loads):
        averages = (f"{load[moment]:.2f}" for moment in ("before", "after"))
        rows.append([str(number), *averages, f"{load['others']:.0%}", "" if load["quiet"] else "**disturbed**"])
    loud = [row for row in rows if row[-1]]
    warning = [
        f"**The machine was not quiet**: in {len(loud)} of {len(rows)} rounds other programs used over {QUIET:.0%} of "
        "the cores. Times of these rounds show little; ratios show more; counts and bytes are exact all the same.",
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
                spread_of(row["step"], 1000, ".0f"),
                spread_of(row.get("step ratio"), 1, ".2f"),
                spread_of(row["cpu"], 1000, ".0f"),
                spread_of(row.get("cpu ratio"), 1, ".2f"),
                " / ".join(f"{row[key].median:.2f}" if key in row else "-" for key in ("step limit", "cpu limit")),
                f"{row['faults'].median:,.0f}",
                f"{row['resident'] / MIB:.0f}",
            ]
        )
    header = ("engine", "forward ms", "backward ms", "optimizer ms", "step ms", "step ratio", "CPU ms per rank",
              "CPU ratio", "step, CPU / limit", "page faults per step", "peak resident MiB")  # fmt: skip
    return markdown(header, rows) + (["Not comparable:", "", *failures, ""] if failures else [])


def _gpu(cells: Sequence[dict[str, Any]], model: str) -> list[str]:
    """Figures of the fake group on a GPU."""
    rows = []
    for cell in cells:
        if cell["model"] == model and "kernels" in cell.get("ranks", [{}])[0]:
            figures = cell["ranks"][0]
            sizes = (f"{figures[key] / MIB:.1f}" for key in ("allocated", "reserved", "left"))
            share = "-" if figures["overlap"] is None else f"{figures['overlap']:.0%}"
            counts = (str(figures[key]) for key in ("retries", "kernels", "copy kernels"))
            rows.append([ENGINES[cell["engine"]].title, cell["strategy"], *sizes, *counts, share])
    header = ("engine", "strategy", "peak MiB allocated", "reserved", "held", "allocator retries", "kernels per step",
              "copies among them", "collectives overlapped")  # fmt: skip
    return markdown(header, rows)


def _figures(cells: Sequence[dict[str, Any]], model: str) -> list[str]:
    rows = []
    for engine, definition in ENGINES.items():
        row = figures_row(cells, model, engine)
        if row:
            rows.append(
                [
                    definition.title,
                    _by_strategy(row.get("peak", {})),
                    _by_strategy(row.get("held", {})),
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


def _failed(cells: Sequence[dict[str, Any]], model: str) -> list[str]:
    """The measurements without a row because they raised."""
    lines = [
        f"- {ENGINES[cell['engine']].title}, {cell['strategy']}: failed, {cell['error'].strip().splitlines()[-1]}"
        for cell in cells
        if cell["model"] == model and "error" in cell
    ]
    return [*lines, ""] if lines else []


def _host(cells: Sequence[dict[str, Any]]) -> list[str]:
    rows, columns = [], []
    for engine in dict.fromkeys(cell["engine"] for cell in cells):
        row = host_row(cells, engine)
        columns = columns or [(tensors, world) for tensors, by_world in row.items() for world in by_world]
        title = ENGINES[engine].title if engine in ENGINES else "bare collectives"
        rows.append([title, *(spread_of(row[n][world], 1, ".0f") if row else "failed" for n, world in columns)])
    lines = [
        "## Host time",
        "",
        "CPU microseconds of forward and backward per unit and step, with collectives that do nothing (a fake process",
        "group) and linear layers of 8 x 8; one process has the layers alone, bare collectives the two gathers and one",
        "reduction of a unit.",
        "",
    ]
    header = ["engine", *(f"{tensors} tensors, {world} ranks" for tensors, world in columns)]
    return lines + markdown(header, rows) if rows else []


def _sweep(cells: Sequence[dict[str, Any]], title: str, models: dict[str, str]) -> list[str]:
    """The wall clock and CPU time of a step at every size, by engine, with the ratio of CPU times."""
    timings = {size: Timings(cells, model) for size, model in models.items()}
    rows = []
    for engine in next(iter(timings.values())).engines:
        row = [ENGINES[engine].title]
        for each in timings.values():
            figures = each.row(engine)
            if "failure" in figures:
                row.append("invalid")
                continue
            ratio = f" ({figures['cpu ratio'].median:.2f})" if "cpu ratio" in figures else ""
            row.append(f"{1000 * figures['step'].median:.0f}, {1000 * figures['cpu'].median:.0f}{ratio}")
        rows.append(row)
    lines = [f"## {title}", "", "Milliseconds of wall clock per step, of CPU time per rank (and its ratio).", ""]
    return lines + markdown(["engine", *timings], rows)


def _by_strategy(values: dict[str, list[int | None]]) -> str:
    """One figure for each strategy, from the fourth step; both where the third differs."""

    def one(steps: list[int | None]) -> str:
        return " then ".join(dict.fromkeys("-" if step is None else f"{step / MIB:.1f}" for step in steps))

    return " / ".join(map(one, values.values()))


def spread_of(spread: Spread | None, factor: float, form: str) -> str:
    """The median, times `factor`, with the lowest and highest where they differ."""
    if spread is None:
        return "-"
    middle, low, high = (format(factor * value, form) for value in spread)
    return middle if low == high else f"{middle} [{low} to {high}]"
