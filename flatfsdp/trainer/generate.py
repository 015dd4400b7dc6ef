"""Text from the model, a byte at a time, while its parameters stay sharded."""

from __future__ import annotations

import torch
from torch import nn

TEMPERATURE = 0.7


@torch.no_grad()
def generate(model: nn.Module, prompt: str, *, length: int, context: int, device: torch.device, seed: int) -> str:
    """`prompt` and `length` bytes that `model` continues it with.

    Collective: each forward gathers parameters from all ranks, so all ranks have to ask for the same `length`. They
    draw from equally seeded generators and get the same text.
    """
    model.eval()
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt.encode())
    for _ in range(length):
        window = torch.tensor([tokens[-context:]], device=device)
        odds = torch.softmax(model(window)[0, -1].float().cpu() / TEMPERATURE, dim=-1)
        tokens.append(int(torch.multinomial(odds, 1, generator=generator)))
    return bytes(tokens).decode(errors="replace")
