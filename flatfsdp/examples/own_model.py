"""A user-defined model and data for the trainer: sequences of numbers, each the sum of the two before it, mod 10.

    python -m flatfsdp.train --model flatfsdp.examples.own_model:make_model \
        --train-data flatfsdp.examples.own_model:make_data --eval-data flatfsdp.examples.own_model:make_eval_data \
        --objective flatfsdp.trainer:CausalLM --steps 200 --output sums
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

MODULUS, LENGTH = 10, 12


class SumPredictor(nn.Module):
    """A causal transformer over numbers."""

    def __init__(self, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.numbers = nn.Embedding(MODULUS, width)
        self.positions = nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(width, MODULUS)

    def forward(self, input_ids: Tensor) -> Tensor:
        length = input_ids.shape[1]
        x = self.numbers(input_ids) + self.positions.weight[:length]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=x.device, dtype=x.dtype)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.head(x)


def make_model() -> nn.Module:
    return SumPredictor()


def make_data(count: int = 2000, seed: int = 0) -> list[dict[str, Tensor]]:
    """Samples for a `CausalLM`, which predicts the next number."""
    numbers = torch.randint(MODULUS, (count, 2), generator=torch.Generator().manual_seed(seed))
    while numbers.shape[1] < LENGTH:
        numbers = torch.cat((numbers, (numbers[:, -2:].sum(1, keepdim=True)) % MODULUS), dim=1)
    return [{"input_ids": row} for row in numbers]


def make_eval_data() -> list[dict[str, Tensor]]:
    return make_data(200, seed=1)
