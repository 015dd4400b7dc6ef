"""A small model, split by torch's tensor parallelism, and its training in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from flatfsdp import FullyShardedDataParallel
from flatfsdp.wrap import ModuleWrapPolicy
from tests.harness.models import Feedforward

NAMES = {1: ("dp",), 2: ("dp", "tp"), 3: ("replicate", "dp", "tp")}
TOKENS, LENGTH, CLASSES = 17, 6, 9


class Net(nn.Module):
    """Tokens to classes, both odd numbers."""

    def __init__(self, width: int = 12, hidden: int = 26, blocks: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, width)
        self.blocks = nn.ModuleList(Feedforward(width, hidden) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, CLASSES, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@lru_cache(maxsize=4)
def mesh_of(*shape: int) -> DeviceMesh:
    """A mesh of this worker's world, with tensor parallelism in the last of two or three dimensions. Collective."""
    return dist.init_device_mesh("cpu", shape, mesh_dim_names=NAMES[len(shape)])


def seeded(build: Callable[[], nn.Module] = Net) -> nn.Module:
    """The result of `build`, the same on every rank."""
    torch.manual_seed(0)
    return build()


def parallelized(net: nn.Module, mesh: DeviceMesh, *, sequence: bool, source: int | None = 0) -> Any:
    """`net`, split over `mesh`; with `sequence`, so are the activations in between. `source`: the rank whose values are
    used, or None for each rank's own."""
    split = Shard(1) if sequence else Replicate()
    plan: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=split),
        "head": ColwiseParallel(input_layouts=split, output_layouts=Replicate()),
        "blocks.*.up": ColwiseParallel(input_layouts=split),
        "blocks.*.down": RowwiseParallel(output_layouts=split),
    }
    if sequence:
        plan |= {"norm": SequenceParallel(), "blocks.*.norm": SequenceParallel()}
    return parallelize_module(net, mesh, plan, src_data_rank=source)


def sharded(
    shape: Iterable[int], *, sequence: bool = True, build: Callable[[], nn.Module] = Net, **options: Any
) -> Any:
    """The model under tensor parallelism and a wrapper, on a mesh of this `shape`."""
    mesh = mesh_of(*shape)
    parallel = parallelized(seeded(build), mesh["tp"], sequence=sequence)
    dp = mesh["dp"] if mesh.ndim == 2 else mesh["replicate", "dp"]
    if mesh.ndim == 3:
        options.setdefault("sharding_strategy", "HYBRID_SHARD")
    options.setdefault("use_orig_params", True)
    return FullyShardedDataParallel(
        parallel, device_mesh=dp, auto_wrap_policy=ModuleWrapPolicy({Feedforward}), **options
    )


def batches(shape: Iterable[int], step: int) -> tuple[Tensor, Tensor, int]:
    """Tokens and classes for every data-parallel place on a mesh of this `shape`, and this rank's place."""
    *dp, tp = shape
    places = 1
    for size in dp:
        places *= size
    generator = torch.Generator().manual_seed(100 + step)
    tokens = torch.randint(0, TOKENS, (places, 4, LENGTH), generator=generator)
    classes = torch.randint(0, CLASSES, (places, 4, LENGTH), generator=generator)
    return tokens, classes, dist.get_rank() // tp if dist.is_initialized() else 0


def loss_of(model: nn.Module, tokens: Tensor, classes: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), classes.flatten())


def step_one(one: nn.Module, shape: Iterable[int], step: int) -> float:
    """Forward and backward of one process for all batches. Returned: the mean loss."""
    tokens, classes, _ = batches(shape, step)
    total = 0.0
    for each, right in zip(tokens, classes, strict=True):
        loss = loss_of(one, each, right) / len(tokens)
        loss.backward()
        total += loss.item()
    return total


def step_ours(model: nn.Module, shape: Iterable[int], step: int) -> float:
    """Forward and backward of this rank for its batch. Returned: the mean loss of all ranks. Collective."""
    tokens, classes, place = batches(shape, step)
    loss = loss_of(model, tokens[place], classes[place])
    loss.backward()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()
