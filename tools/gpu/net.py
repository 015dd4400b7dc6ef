"""The model trained for parity, which can be made to fail, and its batches, the same everywhere."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

VOCABULARY, WIDTH, BLOCKS, ROWS, LENGTH = 101, 64, 4, 4, 12


class Tripped(Exception):
    """A block failed on purpose."""


class Block(nn.Module):
    """A residual block of six parameters.

    Attributes:
        trips: "forward" or "backward": where to raise, once.
        recomputes: None, or whether its forward is recomputed by reentrant checkpointing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.trips = ""
        self.recomputes: bool | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.recomputes is not None:
            return checkpoint(self._compute, x, use_reentrant=self.recomputes)
        return self._compute(x)

    def _compute(self, x: Tensor) -> Tensor:
        if self.trips:
            x = self._trip(x)
        return x + self.down(F.gelu(self.up(self.norm(x))))

    def _trip(self, x: Tensor) -> Tensor:
        where, self.trips = self.trips, ""
        if where == "forward":
            raise Tripped
        tripping = x.clone()
        tripping.register_hook(_raise)
        return tripping


class Net(nn.Module):
    """An embedding, blocks, a head; forward returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def _raise(grad: Tensor) -> Tensor:
    raise Tripped


def build(device: torch.device, *, frozen: bool = False) -> Net:
    """The model, with the same values at every call; `frozen`: freezes the embedding and half of the blocks."""
    torch.manual_seed(0)
    net = Net().to(device)
    if frozen:
        for module in (net.embedding, *net.blocks[: BLOCKS // 2]):
            module.requires_grad_(False)
    return net


def batch(device: torch.device, rank: int, step: int, micro: int = 0) -> tuple[Tensor, Tensor]:
    """The batch of `rank`."""
    generator = torch.Generator().manual_seed(10_000 * step + 100 * micro + rank)
    tokens = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=generator).to(device)
    return tokens[:, :-1], tokens[:, 1:]
