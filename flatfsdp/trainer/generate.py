"""Generate tokens with a sharded model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from flatfsdp import inference
from flatfsdp.trainer.objectives.objectives import logits_of

TEMPERATURE = 0.8  # below it small models repeat themselves, spaces above all


def generate(
    model: nn.Module,
    tokens: Sequence[int],
    *,
    length: int,
    context: int | None = None,
    device: torch.device,
    seed: int,
    temperature: float | Callable[[int], float] = TEMPERATURE,
) -> list[int]:
    """`tokens`, and `length` ones that `model` continues them with.

    Collective: parameters are gathered once, at the beginning (`flatfsdp.inference`). All ranks draw from equally
    seeded generators and get the same tokens. The model is left in the mode, training or not, that it was in.

    Args:
        model: a wrapper; takes tokens, int64 (1, time), and gives logits (1, time, vocabulary), plainly or as an output
            of transformers.
        tokens: at least one.
        context: how many of the last tokens it sees; None for all.
        temperature: divides the logits; 0 always takes the likeliest token. A function is asked for each token, with
            the one before it.
    """
    generator = torch.Generator().manual_seed(seed)
    made = list(tokens)
    training = model.training
    model.eval()
    with inference(model):
        for _ in range(length):
            window = torch.tensor([made[-context:] if context else made], device=device)
            last = logits_of(model(window))[0, -1].float().cpu()
            divisor = temperature(made[-1]) if callable(temperature) else temperature
            if divisor == 0:
                made.append(int(last.argmax()))
            else:
                odds = torch.softmax(last / divisor, dim=-1)
                made.append(int(torch.multinomial(odds, 1, generator=generator)))
    model.train(training)
    return made
