"""The gradients of one step, and the loss of an evaluation.

[Note: loss weights] A step's loss is the sum of all its tokens' losses divided by their number, over all ranks and
microbatches, regardless of their distribution; the objective defines which tokens count. The number is known before the
step, so gradients are those of that mean without rescaling.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import flatfsdp
from flatfsdp import collective_region
from flatfsdp.messages import start_unrecorded
from flatfsdp.trainer.data_loading import Microbatch, Step
from flatfsdp.trainer.launch import RankContext
from flatfsdp.trainer.model.fronts import without_reductions
from flatfsdp.trainer.objectives import Objective, evaluating, logits_of
from flatfsdp.trainer.preemption import StopRequest
from flatfsdp.trainer.randomness import seed_all, seed_of


def weight_of(microbatch: Microbatch, objective: Objective) -> int:
    """The weight of `microbatch`; 0 for a stand-in, which a rank runs because the others run a forward."""
    return int(objective.weight(microbatch.inputs)) if microbatch.ids else 0


def loss_of(microbatch: Microbatch, objective: Objective, model: nn.Module, world: RankContext) -> Tensor:
    """The sum of its losses, fp32; 0 for a stand-in, with zero gradients."""
    loss = objective.loss(model, on_device(microbatch.inputs, world.device))
    return loss if microbatch.ids else loss * 0.0


def add_gradients(
    model: nn.Module,
    step: Step,
    objective: Objective,
    *,
    world: RankContext,
    scale: Callable[[Tensor], Tensor],
    seed: int | None = None,
) -> Tensor:
    """Forward and backward of a step's microbatches, all but the last without reductions. Collective.

    Args:
        scale: applied to each loss before its backward; a gradient scaler's.
        seed: of a run with deterministic sums, whose microbatches draw random numbers by their number. None for others.

    Returns:
        The sum of this rank's losses, fp64 on the device. With a `seed`, one for each microbatch of all ranks, 0 for
        those of others.
    """
    losses = torch.zeros(() if seed is None else (step.count,), dtype=torch.float64, device=world.device)
    # The engine averages gradients over ranks, or over microbatches; the loss is a mean over tokens.
    share = (world.size if seed is None else step.count) / max(step.weight, 1)
    for number, each in enumerate(step.microbatches):
        index = step.first + number if each.ids else None
        numbered: AbstractContextManager[None] = nullcontext()
        if seed is not None:
            numbered = flatfsdp.microbatch(index, of=step.count)
            seed_all(seed_of(seed, step.position, step.first + number))
        with nullcontext() if number == len(step.microbatches) - 1 else without_reductions(model), numbered:
            loss = loss_of(each, objective, model, world)
            scale(loss * share).backward()
            if seed is None:
                losses += loss.detach()
            elif index is not None:
                losses[index] = loss.detach()
    return losses


def on_device(inputs: Any, device: torch.device) -> Any:
    """`inputs` with all tensors in dicts, lists and tuples on `device`, and all other objects with a method `to`."""
    if isinstance(inputs, Mapping):
        return {key: on_device(value, device) for key, value in inputs.items()}
    if isinstance(inputs, tuple) and hasattr(inputs, "_fields"):
        return type(inputs)(*(on_device(value, device) for value in inputs))
    if isinstance(inputs, list | tuple):
        return type(inputs)(on_device(value, device) for value in inputs)
    if isinstance(inputs, Tensor):
        return inputs.to(device, non_blocking=True)
    return inputs.to(device) if callable(getattr(inputs, "to", None)) else inputs


# From logits and a batch to sums, by name, over the items that the objective counts.
Metrics = Callable[[Tensor, Any], Mapping[str, Any]]


def evaluate(
    model: nn.Module,
    batches: Iterable[Microbatch],
    objective: Objective,
    *,
    world: RankContext,
    stop: StopRequest,
    metrics: Metrics | None = None,
    in_order: bool = False,
) -> tuple[dict[str, float], int]:
    """Mean loss over the tokens of all ranks' `batches`, in the same number on each, and the number of these tokens.

    Collective; the same on all ranks. Modules keep their modes (training or not).

    Args:
        metrics: more sums, whose means over the tokens are reported by their names, in addition to those of the
            objective's method `metrics`. The same names for each batch.
        in_order: add up in the order of all ranks' microbatches, so that the bits do not depend on ranks.

    Returns:
        The metrics, and 0; or no metrics, and the number of a request that stopped a rank ([Note: stopping]).
    """
    functions = [each for each in (getattr(objective, "metrics", None), metrics) if each is not None]
    sums: dict[str, list[Tensor]] = {}  # one of all microbatches, or with `in_order` one of each

    def add(name: str, value: Any) -> None:
        totals = sums.setdefault(name, [])
        if in_order or not totals:
            totals.append(torch.zeros((), dtype=torch.float64, device=world.device))
        totals[-1] += value if isinstance(value, Tensor) else float(value)

    requests: Callable[[], int] | None = None
    with evaluating(model), torch.no_grad(), _last_output(model) as last:
        for microbatch in batches:
            if requests is not None and (stopped_by := requests()):
                return {}, stopped_by
            requests = _requests_of_ranks(stop, world)
            add("loss", loss_of(microbatch, objective, model, world))
            add("tokens", weight_of(microbatch, objective))
            if functions:
                logits, inputs = logits_of(last.output), on_device(microbatch.inputs, world.device)
                for name, value in (pair for function in functions for pair in function(logits, inputs).items()):
                    add(name, value if microbatch.ids else value * 0)  # a stand-in does not count
            last.output = None
    return _means(sums, objective, world), 0


@dataclass
class _LastOutput:
    """The last output of the model."""

    output: Any = None


@contextmanager
def _last_output(model: nn.Module) -> Iterator[_LastOutput]:
    last = _LastOutput()
    hook = model.register_forward_hook(lambda module, inputs, output: setattr(last, "output", output))
    try:
        yield last
    finally:
        hook.remove()


def _means(sums: Mapping[str, list[Tensor]], objective: Objective, world: RankContext) -> dict[str, float]:
    """The sums over all ranks, one after the other of each, divided by the number of tokens. Collective."""
    names = sorted({"loss", "tokens", *sums})
    nothing = [torch.zeros((), dtype=torch.float64, device=world.device)]
    own = torch.stack([torch.stack(sums.get(name, nothing)) for name in names])
    every = own.new_zeros(world.size, *own.shape)
    every[world.rank] = own
    with collective_region():
        dist.all_reduce(every)
    # By the number of a microbatch on its rank, then by rank: the order of all.
    found = {name: sum(every[:, row].T.flatten().tolist()) for row, name in enumerate(names)}
    tokens = found.pop("tokens")
    loss = found.pop("loss") / max(tokens, 1.0)
    metrics = {"eval_loss": loss, "eval_tokens": int(tokens)}
    if getattr(objective, "has_perplexity", False):
        metrics["eval_perplexity"] = math.exp(min(loss, 700.0))  # the exponential of a larger loss overflows a float
    return metrics | {f"eval_{name}": value / max(tokens, 1.0) for name, value in found.items()}


def _requests_of_ranks(stop: StopRequest, world: RankContext) -> Callable[[], int]:
    """Send this rank's request to stop, if any, to all ranks while the next forward runs. Returned: a function that
    waits for the highest number of a request, or 0."""
    most = torch.tensor(float(stop.number), device=world.device)
    work = start_unrecorded(dist.all_reduce, most, dist.ReduceOp.MAX, async_op=True)

    def arrived() -> int:
        if work is not None:
            with collective_region():
                work.wait()
        return int(most)

    return arrived
