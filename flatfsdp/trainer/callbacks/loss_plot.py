"""Plot the losses of a run."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flatfsdp.trainer.callbacks.base import Callback, keep_earlier
from flatfsdp.trainer.callbacks.metrics_log import NAME, read_metrics
from flatfsdp.trainer.reports import TrainingResult
from flatfsdp.trainer.run import Run

PICTURE = "loss.png"

log = logging.getLogger("flatfsdp")


class LossPlot(Callback):
    """At the end draw the losses of `metrics.jsonl` (see `MetricsLog`) into `loss.png` beside it, by rank 0.

    Without matplotlib a line in the log names the command that installs it.
    """

    def on_begin(self, trainer: Run) -> None:
        if trainer.world.leads:
            keep_earlier(trainer, PICTURE)

    def on_end(self, trainer: Run, result: TrainingResult) -> None:
        if trainer.world.leads:
            try:
                plot_loss(read_metrics(trainer.output / NAME), trainer.output / PICTURE)
                trainer.written["plot"] = trainer.output / PICTURE
            except ImportError:
                log.warning("no plot of the loss: it needs matplotlib, which comes with pip install 'flatfsdp[train]'")


def plot_loss(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw the loss of every step, smoothed as well, and evaluations, of rows as `read_metrics` gives them.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    steps = [(row["step"], row["loss"]) for row in rows if "loss" in row]
    evaluations = [(row["step"], row["eval_loss"]) for row in rows if "eval_loss" in row]
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    if steps:
        numbers, losses = zip(*steps, strict=True)
        axes.plot(numbers, losses, color="tab:blue", alpha=0.25, linewidth=1)
        axes.plot(numbers, smoothed(losses), color="tab:blue", label="training")
    if evaluations:
        label = f"evaluation, {evaluations[-1][1]:.3f} at the end"
        axes.plot(*zip(*evaluations, strict=True), "o-", color="tab:orange", label=label)
    axes.set(xlabel="step", ylabel="loss", ylim=(0, None))
    if steps or evaluations:
        axes.legend()
    figure.savefig(path, dpi=130)


def smoothed(losses: Sequence[float], *, keep: float = 0.95) -> list[float]:
    """Exponential moving average of `losses`, without the pull towards zero at its start."""
    averages, average, weight = [], 0.0, 0.0
    for loss in losses:
        average = keep * average + (1 - keep) * loss
        weight = keep * weight + (1 - keep)
        averages.append(average / weight)
    return averages
