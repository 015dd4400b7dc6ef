"""Optimizers and schedules by name."""

from __future__ import annotations

import torch

OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
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
"""Those of torch that treat every element alike: the same numbers on any number of ranks."""

NO_OPTIMIZERS = {
    "adafactor": "It looks at rows and columns, and a rank has no whole ones.",
    "muon": "It looks at whole matrices, and a rank has none.",
    "lbfgs": "It calls the model several times in a step, by a closure.",
    "sparseadam": "It wants sparse gradients, and reduced ones are dense.",
}
"""Those of torch that it does not name, each with the reason."""

SCHEDULERS = ("constant", "linear", "cosine")
