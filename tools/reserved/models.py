"""The models whose memory is predicted: the one that was measured on a card, and two with units of several sizes."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.benchmark.models import GPT, Case, GPTBlock, MLPBlock

VOCABULARY, LENGTH, WIDTH, HEADS = 16384, 1024, 2048, 16


class Part(nn.Module):
    """A module that is a unit."""


class Tokens(nn.Embedding, Part):
    pass


class Head(nn.Linear, Part):
    pass


class Block(GPTBlock, Part):
    pass


class Expert(MLPBlock, Part):
    """An MLP without a residual."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.gelu(self.up(x)))
        return y


class Attention(Part):
    """Causal attention, added to the stream it reads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norm(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y: Tensor = x + self.projection(mixed.transpose(1, 2).reshape(batch, length, width))
        return y


class Layer(nn.Module):
    """Attention, and experts of which each gets the same number of tokens, whichever: there are no values."""

    def __init__(self, width: int, heads: int, hidden: int, experts: int) -> None:
        super().__init__()
        self.attention = Attention(width, heads)
        self.norm = nn.LayerNorm(width)
        self.router = nn.Linear(width, experts)
        self.experts = nn.ModuleList(Expert(width, hidden) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention(x)
        normed = self.norm(x)
        weights = self.router(normed).softmax(-1).flatten(0, 1)
        rows = normed.flatten(0, 1)
        token = torch.arange(2 * rows.shape[0] // len(self.experts)).to(rows.device)  # each goes to two
        out = torch.zeros_like(rows)
        for index, expert in enumerate(self.experts):
            out = out.index_add(0, token, expert(rows[token]) * weights[token, index : index + 1])
        return x + out.view_as(x)


def _parts(model: GPT, *, ends: bool) -> GPT:
    """`model`, whose embedding and head are units, too, if `ends`."""
    if ends:
        model.tok = Tokens(VOCABULARY, WIDTH)
        model.head = Head(WIDTH, VOCABULARY, bias=False)
    return model


def gpt_of_parts() -> GPT:
    """12 blocks, and the embedding and the head, each a unit."""
    model = GPT(VOCABULARY, LENGTH, WIDTH, 0, HEADS)
    model.blocks = nn.Sequential(*(Block(WIDTH, HEADS) for _ in range(12)))
    return _parts(model, ends=True)


def experts(*, ends: bool = False) -> GPT:
    """6 layers of attention and 6 experts, each a unit."""
    model = GPT(VOCABULARY, LENGTH, WIDTH, 0, HEADS)
    model.blocks = nn.Sequential(*(Layer(WIDTH, HEADS, 2 * WIDTH, 6) for _ in range(6)))
    return _parts(model, ends=ends)


# The first as in tools/gpu/memory.py, which imports what needs a card.
CASES = {
    case.name: case
    for case in (
        Case("gpt", partial(GPT, VOCABULARY, LENGTH, WIDTH, 19, HEADS), GPTBlock, LENGTH, VOCABULARY, 1),
        Case("parts", gpt_of_parts, Part, LENGTH, VOCABULARY, 1),
        Case("experts", experts, Part, LENGTH, VOCABULARY, 1),
        Case("experts and ends", partial(experts, ends=True), Part, LENGTH, VOCABULARY, 1),
    )
}
