"""Lightning's Fabric, as LitGPT uses it: its FSDPStrategy, which is FSDP1, or its ModelParallelStrategy; accumulation,
clipping, a checkpoint, and training from it.

with_fabric.py FOLDER v1|v2 [OPTION...]      OPTION: clip | one-file | bf16 | ac
"""

import sys

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from lightning.fabric.strategies import FSDPStrategy, ModelParallelStrategy
from outcome import write
from torch import nn
from torch.distributed.fsdp import fully_shard

folder, version, *options = sys.argv[1:]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner, self.outer = nn.LayerNorm(16), nn.Linear(16, 34), nn.Linear(34, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outer(torch.relu(self.inner(self.norm(x))))


class OnCPU(FSDPStrategy):
    """What makes Lightning accept a CPU: it refuses the class itself there."""


def sharded(model, mesh):  # type: ignore[no-untyped-def]
    for block in model:
        fully_shard(block, mesh=mesh["data_parallel"])
    return fully_shard(model, mesh=mesh["data_parallel"])


if version == "v1":
    strategy = OnCPU(
        auto_wrap_policy={Block},
        state_dict_type="full" if "one-file" in options else "sharded",
        activation_checkpointing_policy={Block} if "ac" in options else None,
    )
else:
    strategy = ModelParallelStrategy(sharded, data_parallel_size=2, tensor_parallel_size=1)
fabric = Fabric(
    accelerator="cpu", strategy=strategy, devices=2, precision="bf16-mixed" if "bf16" in options else "32-true"
)
fabric.launch()


def build():  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    with fabric.init_module(empty_init=False):
        model = nn.Sequential(nn.Linear(8, 16), *[Block() for _ in range(3)], nn.Linear(16, 4))
    model = fabric.setup_module(model)
    return model, fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))


generator = torch.Generator().manual_seed(1 + fabric.global_rank)
seen = []


def train(model, optimizer):  # type: ignore[no-untyped-def]
    for _ in range(3):
        for accumulates in (True, False):
            x, y = torch.randn(8, 8, generator=generator), torch.randint(0, 4, (8,), generator=generator)
            with fabric.no_backward_sync(model, enabled=accumulates):
                loss = F.cross_entropy(model(x).float(), y)
                fabric.backward(loss / 2)
            seen.append(float(loss.detach()))
        if "clip" in options:
            norm = fabric.clip_gradients(model, optimizer, max_norm=0.5)
            seen.append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))
        optimizer.step()
        optimizer.zero_grad()


model, optimizer = build()
train(model, optimizer)
fabric.save(f"{folder}/saved", {"model": model, "optimizer": optimizer, "step": 3})
again, optimizer = build()
state = {"model": again, "optimizer": optimizer, "step": 0}
fabric.load(f"{folder}/saved", state)
seen.append(state["step"])
train(again, optimizer)
write(folder, seen, model.module, again.module)
torch.distributed.destroy_process_group()
