"""The gradients of one step.

[Note: weights] A step's loss is the sum of all its tokens' losses divided by their number, over all ranks and
microbatches, however they are spread; the objective decides what counts as a token. The number comes with the samples,
so gradients are those of that mean without being scaled afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from flatfsdp import FullyShardedDataParallel
from flatfsdp.trainer.data_loading import Microbatch, Step
from flatfsdp.trainer.launch import RankContext
from flatfsdp.trainer.objectives.objectives import Objective


def weight_of(microbatch: Microbatch, objective: Objective) -> int:
    """What `microbatch` counts; 0 for a stand-in, which a rank runs because the others run something."""
    return int(objective.weight(microbatch.inputs)) if microbatch.ids else 0


def loss_of(
    microbatch: Microbatch, objective: Objective, model: FullyShardedDataParallel, world: RankContext
) -> Tensor:
    """The sum of its losses, fp32; 0 of a stand-in, with gradients of 0."""
    loss = objective.loss(model, on_device(microbatch.inputs, world.device))
    return loss if microbatch.ids else loss * 0.0


def add_gradients(
    model: FullyShardedDataParallel,
    step: Step,
    objective: Objective,
    *,
    world: RankContext,
    scale: Callable[[Tensor], Tensor],
) -> Tensor:
    """Forward and backward of a step's microbatches, all but the last under `no_sync`. Collective.

    Args:
        scale: applied to each loss before its backward; a gradient scaler's.

    Returns:
        The sum of this rank's losses, an fp64 scalar on the device.
    """
    total = torch.zeros((), dtype=torch.float64, device=world.device)
    # The engine averages gradients over ranks; this is a mean over tokens.
    share = world.size / max(step.weight, 1)
    for number, microbatch in enumerate(step.microbatches, 1):
        with nullcontext() if number == len(step.microbatches) else model.no_sync():
            loss = loss_of(microbatch, objective, model, world)
            scale(loss * share).backward()
            total += loss.detach()
    return total


def on_device(inputs: Any, device: torch.device) -> Any:
    """`inputs` with all tensors in dicts, lists and tuples on `device`; of other things with a method `to`, too."""
    if isinstance(inputs, Mapping):
        return {key: on_device(value, device) for key, value in inputs.items()}
    if isinstance(inputs, tuple) and hasattr(inputs, "_fields"):
        return type(inputs)(*(on_device(value, device) for value in inputs))
    if isinstance(inputs, list | tuple):
        return type(inputs)(on_device(value, device) for value in inputs)
    if isinstance(inputs, Tensor):
        return inputs.to(device, non_blocking=True)
    return inputs.to(device) if callable(getattr(inputs, "to", None)) else inputs
