"""The optimizers and learning-rate schedules that settings name."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch.optim import Optimizer

__all__ = ["NOT_BY_NAME", "OPTIMIZERS", "SCHEDULERS"]

OPTIMIZERS: dict[str, type[Optimizer]] = {
    kind.__name__.lower(): kind
    for kind in (
        torch.optim.AdamW,
        torch.optim.Adam,
        torch.optim.SGD,
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adamax,
        torch.optim.ASGD,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
    )
}
"""Those of torch that are element-wise, hence give the same numbers on any number of ranks."""

NOT_BY_NAME = {
    "adafactor": "Adafactor looks at rows and columns, of which a rank may have parts.",
    "muon": "Muon looks at whole matrices, of which a rank may have parts.",
    "lbfgs": "LBFGS calls the model several times in a step, which the trainer does not.",
    "sparseadam": "SparseAdam wants sparse gradients, and reduced ones are dense.",
}
"""Those of torch that settings do not name, each with the reason."""


def _constant(_: float) -> float:
    return 1.0


def _linear(done: float) -> float:
    return 1.0 - done


def _cosine(done: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * done))


SCHEDULERS: Mapping[str, Callable[[float], float]] = {"constant": _constant, "linear": _linear, "cosine": _cosine}
"""Names of schedules: the share of the highest learning rate when a share of the run after the warmup is over."""
