"""A model with experts, which ranks divide over a separate mesh, like torchtitan and transformers."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

WIDTH, EXPERTS, HIDDEN = 8, 4, 12


def gathered(x: Tensor, group: Any) -> Tensor:
    out = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(out, x.contiguous(), group=group)
    return torch.cat(out)


def scattered(x: Tensor, group: Any) -> Tensor:
    x = x.clone()
    dist.all_reduce(x, group=group)
    return x.chunk(group.size())[group.rank()].clone()


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return gathered(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return scattered(grad, ctx.group), None


class Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return scattered(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return gathered(grad, ctx.group), None


class Experts(nn.Module):
    """Two layers for each expert. Tokens go to all experts, weighted."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) * 0.3)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) * 0.3)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        up, down = self.up, self.down
        if not isinstance(up, DTensor):
            return mixed(x, up, down, gate)
        assert isinstance(down, DTensor)
        group = up.device_mesh.get_group()
        mine, rank = up.to_local(), group.rank()
        count = mine.shape[0]
        share = Gather.apply(gate, group)[:, rank * count : (rank + 1) * count]
        return Scatter.apply(mixed(Gather.apply(x, group), mine, down.to_local(), share), group)


def mixed(x: Tensor, up: Tensor, down: Tensor, gate: Tensor) -> Tensor:
    hidden = torch.relu(torch.einsum("td,edh->teh", x, up))
    return torch.einsum("teh,ehd,te->td", hidden, down, gate)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router, self.experts = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, EXPERTS), Experts()
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.out(self.experts(y, self.router(y).softmax(-1)))


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def divide(net: Any, mesh: Any) -> Any:
    """Distribute the experts over the ranks of `mesh`."""
    for block in net.blocks:
        for name in ("up", "down"):
            whole = getattr(block.experts, name).detach()
            setattr(block.experts, name, nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)])))
    return net


def loss_on(net: nn.Module, step: int, rank: int, world: int) -> Tensor:
    """A rank's part of the mean loss over all ranks' tokens."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(world, 5, WIDTH, generator=generator)
    classes = torch.randint(0, 3, (world, 5), generator=generator)
    return nn.functional.cross_entropy(net(x[rank]), classes[rank], reduction="sum") / (world * 5)
