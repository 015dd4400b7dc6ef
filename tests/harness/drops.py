"""How programs drop gradients, and the parameters that modules list meanwhile."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import nn


def drop_gradients(net: nn.Module, optimizer: torch.optim.Optimizer, drawn: random.Random, *, to_none: bool) -> None:
    """Drop all gradients of `net`, or set them to zero, in one of the ways of programs."""
    match drawn.choice(("optimizer", "module", "around", "by hand")):
        case "optimizer":
            optimizer.zero_grad(to_none)
        case "module":
            net.zero_grad(to_none)
        case "around":
            nn.Sequential(net).zero_grad(to_none)
        case _:
            for parameter in nn.ModuleList([net]).parameters():
                if to_none:
                    parameter.grad = None
                elif parameter.grad is not None:
                    parameter.grad.zero_()


def unlisted(net: nn.Module, users: Sequence[nn.Parameter]) -> list[str]:
    """The parameters that `net` lists instead of the `users` own, by name."""
    found = [*net.named_parameters()]
    if len(found) != len(users):
        return [f"{len(found)} parameters instead of {len(users)}"]
    return [name for (name, parameter), own in zip(found, users, strict=True) if parameter is not own]
