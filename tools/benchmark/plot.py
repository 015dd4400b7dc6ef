"""The results as one picture."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")

from matplotlib import pyplot as plt
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from .engines import BASE, ENGINES
from .host import BARE
from .rows import Timings, figures_row, host_row

_GREENS, _OTHERS = ("#0b5", "#085", "#0a8", "#7c4", "#0d9", "#6ba", "#9a3", "#560", "#3d6"), ("#48c", "#259", "#e80")
COLORS = dict(zip(ENGINES, (*_GREENS, *_OTHERS, "#999", "#ccc"), strict=True))
_STYLES = {"2": "o-", "12": "s--"}  # by number of tensors
Value = Callable[[str, str], float | None]  # by model and engine


def draw(results: dict[str, Any], path: Path) -> None:
    """Times and bytes relative to `BASE` by model, and host times by world; gaps where there are no data."""
    figure, axes = plt.subplots(2, 2, figsize=(13, 8.5), layout="constrained")
    models = [model["name"] for model in results.get("models", [])]
    timings = {model: Timings(results["cells"], model) for model in models}
    rows = {(model, engine): t.row(engine) for model, t in timings.items() for engine in t.engines}
    memory = {(m, e): figures_row(results.get("figures", []), m, e).get("peak") for m in models for e in ENGINES}

    def ratio(cost: str) -> Value:
        return lambda model, engine: getattr(rows.get((model, engine), {}).get(f"{cost} ratio"), "median", None)

    def peak(model: str, engine: str) -> float | None:
        mine, base = (memory[model, name] and memory[model, name]["FULL_SHARD"][-1] for name in (engine, BASE))
        return mine / base if mine and base else None

    _bars(axes[0, 0], "step, wall clock", models, ratio("step"))
    _bars(axes[0, 1], "step, CPU time per rank", models, ratio("cpu"))
    _bars(axes[1, 0], "peak bytes of live tensors, FULL_SHARD", models, peak)
    _host(axes[1, 1], results.get("host", []))
    shown = [engine for engine in ENGINES if any(engine in each.engines for each in timings.values())]
    _save(figure, path, shown)


def draw_sweep(results: dict[str, Any], path: Path) -> None:
    """CPU time of a step by number of units, and by size of a unit."""
    figure, axes = plt.subplots(1, 2, figsize=(12, 5.5), layout="constrained")
    shown: dict[str, None] = {}
    for axis, (title, models) in zip(axes, results["sweeps"].items(), strict=True):
        for engine, color in COLORS.items():
            points = []
            for size, model in models.items():
                timings = Timings(results["cells"], model)
                if engine in timings.engines and timings.failure(engine) is None:
                    points.append((int(size), 1000 * timings.row(engine)["cpu"].median))
            if points:
                axis.plot(*zip(*points, strict=True), "o-", color=color)
                shown[engine] = None
        axis.set(title=title, ylabel="CPU ms per rank and step", xscale="log", yscale="log")
        axis.set_xticks([int(size) for size in models], models, minor=False)
        axis.minorticks_off()
    _save(figure, path, shown)


def _save(figure: Any, path: Path, engines: Iterable[str]) -> None:
    """Write `figure` with the legend of `engines` below the plots."""
    patches = [Patch(color=COLORS[engine], label=ENGINES[engine].title) for engine in engines]
    figure.legend(handles=patches, loc="outside lower center", ncols=4)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _bars(axis: Any, title: str, models: list[str], value: Value) -> None:
    engines = [engine for engine in ENGINES if any(value(model, engine) is not None for model in models)]
    width = 0.8 / max(1, len(engines))
    for place, engine in enumerate(engines):
        heights = [value(model, engine) or 0.0 for model in models]
        left = [index - 0.4 + (place + 0.5) * width for index in range(len(models))]
        axis.bar(left, heights, width, color=COLORS[engine])
    axis.axhline(1.0, color="black", linewidth=0.6)
    axis.set_xticks(range(len(models)), models)
    axis.set_title(f"{title}, {ENGINES[BASE].title} = 1")
    if any((value(model, engine) or 0.0) > 3 for model in models for engine in engines):
        axis.set_ylim(0, 3)  # larger values would flatten all others; the table has them


def _host(axis: Any, cells: list[dict[str, Any]]) -> None:
    """By engine and number of tensors; the collectives alone in black, a lower bound for all engines."""
    for engine, color in {**COLORS, BARE: "black"}.items():
        for tensors, by_world in host_row(cells, engine).items():
            points = [(int(world), spread.median) for world, spread in by_world.items()]
            axis.plot(*zip(*points, strict=True), _STYLES[tensors], color=color)
    axis.set(title="host microseconds per unit and step", xlabel="ranks (fake group)", xscale="log", ylim=(0, None))
    if cells:
        worlds = sorted({int(world) for cell in cells for world in cell.get("ranks", [{"2": {}}])[0]["2"]})
        axis.set_xticks(worlds, worlds)
        axis.minorticks_off()
        styles = [Line2D([], [], color="gray", marker=style[0], ls=style[1:], label=f"{n} tensors")
                  for n, style in _STYLES.items()]  # fmt: skip
        axis.legend(handles=[*styles, Line2D([], [], color="black", label="collectives alone")], fontsize=8)
