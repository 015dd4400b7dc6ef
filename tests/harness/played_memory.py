"""What random models draw about the memory and the marks of parameters: ties by `.data`, parts of one storage,
attributes, and assignments to `.data` between steps. They are drawn for a model that is to be sharded; in one process
the numbers are the same without ties by `.data` and parts."""

from __future__ import annotations

import random

import torch
from torch import nn


def drawn_memory(net: nn.Module, seed: int) -> nn.Module:
    """`net`, whose tied parameters are, at times, different parameters of one memory, and pairs of others disjoint
    parts of one storage. Each has a mark."""
    drawn = random.Random(f"memory {seed}")
    met: set[nn.Parameter] = set()
    aliases = False
    for module in net.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter in met and parameter is not None and drawn.random() < 0.5:
                setattr(module, name, nn.Parameter(parameter.data, parameter.requires_grad))
                aliases = True
            elif parameter is not None:
                met.add(parameter)
    if not aliases and drawn.random() < 0.4:
        alike: dict[torch.Size, list[nn.Parameter]] = {}
        for parameter in net.parameters():
            alike.setdefault(parameter.shape, []).append(parameter)
        for members in alike.values():
            dim = drawn.randrange(2)
            pair = drawn.sample(members, 2) if len(members) > 1 else []
            parts = torch.cat([each.detach() for each in pair], dim).chunk(2, dim) if pair else ()
            for each, part in zip(pair, parts, strict=True):
                _put(net, each, nn.Parameter(part, each.requires_grad))
    for parameter in net.parameters():
        parameter.marked = list(parameter.shape)  # type: ignore[attr-defined]
    return net


def _put(net: nn.Module, old: nn.Parameter, new: nn.Parameter) -> None:
    for module in net.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is old:
                setattr(module, name, new)


def without_marks(model: nn.Module) -> list[str]:
    """A line for each parameter that has lost its mark."""
    return [f"{name} has lost its mark" for name, each in model.named_parameters() if not hasattr(each, "marked")]


def assign_gradients(model: nn.Module, seed: int, step: int) -> None:
    """At times, `.grad.data = ...`: the same for every gradient."""
    if random.Random(f"gradients {seed} {step}").random() < 0.3:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.data = parameter.grad.data * 0.5


def assign_values(model: nn.Module, seed: int, step: int) -> None:
    """At times, `.data = ...` after a step: new values, or others that are put back."""
    drawn = random.Random(f"values {seed} {step}").random()
    if drawn < 0.25:
        for parameter in model.parameters():
            parameter.data = parameter.data * 0.9
    elif drawn < 0.5:
        kept = [parameter.data for parameter in model.parameters()]
        for parameter in model.parameters():
            parameter.data = parameter.data * 3
        for parameter, value in zip(model.parameters(), kept, strict=True):
            parameter.data = value
