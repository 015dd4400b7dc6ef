"""A small model whose parameters and inputs are DTensors on a mesh of all axes."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor

WIDTH, HIDDEN, CLASSES, ROWS = 6, 10, 3, 8


class Block(nn.Module):
    """A feedforward block with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def seeded() -> Net:
    """A new model, the same on every rank."""
    torch.manual_seed(0)
    return Net()


@lru_cache(maxsize=8)
def mesh_of(shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """A mesh of this worker's world. Collective at the first call."""
    return dist.init_device_mesh("cpu", shape, mesh_dim_names=names)


def on_mesh(net: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """`net` with all parameters on `mesh`, split along "tp" in Megatron's way if there is such a dimension."""

    def place(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for attribute, parameter in list(module.named_parameters(recurse=False)):
            placements: list[Any] = [Replicate()] * mesh.ndim
            if "tp" in (mesh.mesh_dim_names or ()):
                last = name.rpartition(".")[2]
                if last == "up" or (last == "down" and attribute == "weight"):
                    placements[mesh.mesh_dim_names.index("tp")] = Shard(int(last == "down"))  # type: ignore[union-attr]
            value = distribute_tensor(parameter.detach(), mesh, placements)
            setattr(module, attribute, nn.Parameter(value))

    return distribute_module(net, mesh, place)


def inputs(step: int, mesh: DeviceMesh, dp: tuple[str, ...]) -> Tensor:
    """Rows that are split over the dimensions `dp`."""
    generator = torch.Generator().manual_seed(100 + step)
    x = torch.randn(ROWS, WIDTH, generator=generator)
    names = mesh.mesh_dim_names or ()
    return distribute_tensor(x, mesh, [Shard(0) if name in dp else Replicate() for name in names])


def step_one(one: nn.Module, step: int) -> float:
    """Forward and backward of one process for all rows."""
    generator = torch.Generator().manual_seed(100 + step)
    loss = one(torch.randn(ROWS, WIDTH, generator=generator)).square().sum() / ROWS
    loss.backward()
    return loss.item()


def step_on_mesh(net: nn.Module, step: int, mesh: DeviceMesh, dp: tuple[str, ...]) -> float:
    """Forward and backward of all ranks, each for its rows. Collective."""
    loss: Any = net(inputs(step, mesh, dp)).square().sum() / ROWS
    loss.backward()
    assert isinstance(loss, DTensor)
    return loss.full_tensor().item()
