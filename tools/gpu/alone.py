"""Training in one process without an engine: the reference for parity."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.func import functional_call

from . import net

STEPS, RATE, MOMENTUM = 4, 0.5, 0.9


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of all trainings."""
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=RATE, momentum=MOMENTUM)


@dataclass(frozen=True)
class Course:
    """The settings of a training, independent of the engine.

    Attributes:
        seen: the form of the parameters that modules compute with: a key of `SEEN`.
        micro: the number of backwards in a step.
        clip: the norm to which gradients are clipped.
        frozen: whether some parameters are frozen.
        skipped: the step in which gradients overflow, so that no parameter changes.
    """

    seen: str = "as they are"
    micro: int = 1
    clip: float | None = None
    frozen: bool = False
    skipped: int | None = None


@dataclass(frozen=True)
class Story:
    """The results of a training.

    Attributes:
        losses: of one rank, or (for one process) of each rank, by step and microbatch.
        parameters: the unsharded final parameters, on the CPU, by name.
    """

    losses: Sequence[Sequence[float]]
    parameters: Mapping[str, Tensor]


def _rounded(name: str, parameter: Tensor) -> Tensor:
    """The weights of the blocks' linear layers rounded to bfloat16, with the gradient of the rounded ones."""
    if not name.startswith("blocks.") or "norm" in name or not name.endswith("weight"):
        return parameter
    return parameter + (parameter.detach().bfloat16().float() - parameter.detach())


SEEN: dict[str, Callable[[str, Tensor], Tensor]] = {
    "as they are": lambda name, parameter: parameter,
    "bfloat16": lambda name, parameter: parameter.bfloat16(),
    "float16": lambda name, parameter: parameter.half(),
    "rounded": _rounded,
}


@lru_cache(maxsize=64)
def train(course: Course, world: int, device: torch.device) -> Story:
    """Train on the batches of all ranks of a `world`, one after the other."""
    model = net.build(device, frozen=course.frozen)
    optimizer, seen = optimizer_of(model), SEEN[course.seen]
    losses: list[list[float]] = []
    for step in range(STEPS):
        losses += [[] for _ in range(world)]
        for rank in range(world):
            for micro in range(course.micro):
                values = {name: seen(name, parameter) for name, parameter in model.named_parameters()}
                loss = functional_call(model, values, net.batch(device, rank, step, micro))
                (loss.float() / (world * course.micro)).backward()
                losses[-world + rank].append(float(loss.detach()))
        if course.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), course.clip)
        if step != course.skipped:
            optimizer.step()
        optimizer.zero_grad()
    return Story(losses, {name: p.detach().cpu() for name, p in model.named_parameters()})


def apart(found: Story, truth: Story, rank: int, world: int) -> float:
    """The distance of `rank`'s story from the reference: the larger of the largest relative difference of a loss, and
    the distance of parameters relative to their total change; infinite for missing or non-finite values.
    """
    own = [losses for at, losses in enumerate(truth.losses) if at % world == rank]
    pairs = [pair for a, b in zip(found.losses, own, strict=True) for pair in zip(a, b, strict=True)]
    far = max(abs(a - b) / abs(b) if math.isfinite(a) else math.inf for a, b in pairs)
    if found.parameters.keys() != truth.parameters.keys():
        return math.inf
    start = {name: p.detach().cpu() for name, p in net.build(torch.device("cpu")).named_parameters()}
    off = sum(
        float((found.parameters[name].double() - p.double()).square().sum()) for name, p in truth.parameters.items()
    )
    gone = sum(float((p.double() - start[name].double()).square().sum()) for name, p in truth.parameters.items())
    ratio = math.sqrt(off / gone)
    return max(far, ratio) if math.isfinite(ratio) else math.inf
