"""The trained models: five, with their batches, equal to the byte on every rank, in every engine and run.

Losses are computed inside forward, so that an engine sees one call per step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = tuple[Tensor, ...]

WIDTH = 512  # of the MLP stacks


class GPTBlock(nn.Module):
    """A pre-norm transformer block: causal attention of `heads` heads, then an MLP of four times the width."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Untied embeddings, learned positions, cross-entropy with the next token."""

    def __init__(
        self, vocabulary: int = 8192, length: int = 64, width: int = 384, blocks: int = 10, heads: int = 6
    ) -> None:
        super().__init__()
        self.tok = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.Sequential(*(GPTBlock(width, heads) for _ in range(blocks)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tok(tokens) + self.positions
        return F.cross_entropy(self.head(self.norm(self.blocks(x))).flatten(0, 1), targets.flatten())


class SmallParts(nn.Module):
    """Ten parameters of 5 KiB in total: two norms, a linear layer, two scales, two shifts."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)
        self.scale1, self.scale2 = nn.Parameter(torch.ones(width)), nn.Parameter(torch.ones(width))
        self.shift1, self.shift2 = nn.Parameter(torch.zeros(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.linear(self.norm1(x) * self.scale1 + self.shift1)
        return self.norm2(x) * self.scale2 + self.shift2


class SmallUnit(nn.Sequential):
    """Four times `SmallParts`: 40 parameters, 21 KB."""

    def __init__(self, width: int) -> None:
        super().__init__(*(SmallParts(width) for _ in range(4)))


class MLPBlock(nn.Module):
    """A residual block of two linear layers."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class ExpertsBlock(nn.Module):
    """A residual mixture of experts: every token goes through its router's top two."""

    def __init__(self, width: int, hidden: int, experts: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.router = nn.Linear(width, experts)
        self.experts = nn.ModuleList(MLPBlock(width, hidden) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        weights, chosen = self.router(normed).softmax(-1).topk(2)
        out = x
        # An expert without tokens runs on an empty batch, so that its gradient is zero instead of None.
        for index, expert in enumerate(self.experts):
            token, place = (chosen == index).nonzero(as_tuple=True)
            out = out.index_add(0, token, expert(normed[token]) * weights[token, place, None])
        return out


class TinyUnit(nn.Sequential):
    """`tensors` parameters of a few bytes, in linear layers: all time is spent on the host."""

    def __init__(self, tensors: int) -> None:
        super().__init__(*(nn.Linear(8, 8) for _ in range(tensors // 2)))


class Regression(nn.Module):
    """A body of blocks; the loss is the mean square distance to a target of the input's shape."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*blocks)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return (self.blocks(x) - target).square().mean()


def mlp(blocks: int = 8, factor: int = 1, width: int = WIDTH) -> nn.Module:
    """Residual blocks of ``factor`` times 4 MiB at the usual width, and their biases."""
    return Regression(*(MLPBlock(width, 1024 * factor) for _ in range(blocks)))


def tiny(units: int, tensors: int) -> nn.Module:
    """A model for host times."""
    return Regression(*(TinyUnit(tensors) for _ in range(units)))


@dataclass(frozen=True)
class Case:
    """A model, its batches, and the length of its measurement.

    Attributes:
        make: builds a new model; call `build`, which seeds first.
        unit: the class that is wrapped, in addition to the root.
        rows, width: the shape of a batch of floats per rank; for the GPT, ``rows`` tokens.
        steps: timed steps per round of a full run.
    """

    name: str
    make: Callable[[], nn.Module]
    unit: type[nn.Module]
    rows: int
    width: int
    steps: int

    def build(self, device: torch.device | str = "cpu") -> nn.Module:
        """Build the model on `device`; equal at every call for one kind of device."""
        torch.manual_seed(0)
        with torch.device(device):
            return self.make()

    def batch(self, rank: int, step: int) -> Batch:
        """The batch of ``rank`` in ``step``."""
        generator = torch.Generator().manual_seed(1000 * step + rank)
        if self.unit is GPTBlock:
            tokens = torch.randint(self.width, (1, self.rows + 1), generator=generator)
            return tokens[:, :-1], tokens[:, 1:]
        return tuple(torch.randn(2, self.rows, self.width, generator=generator))

    def unit_bytes(self) -> list[int]:
        """Bytes of parameters by unit in the order of forward, then those of the root, if any."""
        with torch.device("meta"):
            model = self.make()
        size = [sum(p.nbytes for p in unit.parameters()) for unit in model.modules() if isinstance(unit, self.unit)]
        root = sum(p.nbytes for p in model.parameters()) - sum(size)
        return [*size, root] if root else size


def mlp_case(blocks: int, factor: int) -> Case:
    """A point of the scaling sweep."""
    return Case(f"mlp {blocks}x{factor}", partial(mlp, blocks, factor), MLPBlock, 16, WIDTH, 3)


def tiny_case(units: int, tensors: int) -> Case:
    """A cell of the host times."""
    return Case(f"{tensors} tensors", partial(tiny, units, tensors), TinyUnit, 2, 8, 12)


def _small() -> nn.Module:
    return Regression(*(SmallUnit(32) for _ in range(64)))


def _experts() -> nn.Module:
    return Regression(*(ExpertsBlock(256, 512, 8) for _ in range(4)))


MODELS = {
    case.name: case
    for case in (
        Case("gpt", GPT, GPTBlock, 64, 8192, 5),
        Case("small", _small, SmallUnit, 16, 32, 5),
        Case("mlp", mlp, MLPBlock, 16, WIDTH, 6),
        Case("mlp8x", partial(mlp, 8, 8), MLPBlock, 16, WIDTH, 2),
        Case("experts", _experts, ExpertsBlock, 64, 256, 6),
    )
}
# 210M parameters: too slow for every run.
LARGE = Case("gpt 210M", partial(GPT, width=1152, blocks=12), GPTBlock, 64, 8192, 2)

# By title, the models by size.
SWEEPS = {
    "Units of 4 MiB": {str(units): mlp_case(units, 1) for units in (1, 4, 16, 64)},
    "8 units of 4 MiB times": {str(factor): mlp_case(8, factor) for factor in (1, 2, 4, 8)},
}
