"""The loss as a picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

UNIFORM = math.log(256)  # the loss of knowing nothing about bytes


def plot_loss(losses: Sequence[float], validation: float, folder: Path) -> str:
    """Draw the loss of every step, smoothed as well, and the validation loss into `folder`/loss.png; the folder exists.

    Returns the path of the picture or, without matplotlib, how to get one.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return "none: it needs matplotlib, which comes with pip install 'flatfsdp[train]'"
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    steps = range(1, len(losses) + 1)
    axes.axhline(UNIFORM, color="0.8", linewidth=1, label="uniform bytes, ln 256")
    axes.plot(steps, losses, color="tab:blue", alpha=0.25, linewidth=1)
    axes.plot(steps, smoothed(losses), color="tab:blue", label="training")
    axes.plot([len(losses)], [validation], "o", color="tab:orange", label=f"validation {validation:.3f}")
    axes.set(xlabel="step", ylabel="nats per byte", ylim=(0, None))
    axes.legend()
    path = folder / "loss.png"
    figure.savefig(path, dpi=130)
    return str(path)


def smoothed(losses: Sequence[float], *, keep: float = 0.95) -> list[float]:
    """Exponential moving average of `losses`, without the pull towards zero at its start."""
    averages, average, weight = [], 0.0, 0.0
    for loss in losses:
        average = keep * average + (1 - keep) * loss
        weight = keep * weight + (1 - keep)
        averages.append(average / weight)
    return averages
