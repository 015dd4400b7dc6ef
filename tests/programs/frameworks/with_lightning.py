"""Lightning's ModelParallelStrategy: meta init, an epoch, a checkpoint, and a second epoch from it.

with_lightning.py FOLDER [OPTION...]      OPTION: tp | one-file | bf16 | accumulate
"""

import sys

import lightning
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import ModelParallelStrategy
from outcome import write
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

folder, *options = sys.argv[1:]
tensor = 2 if "tp" in options else 1


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner, self.outer = nn.LayerNorm(16), nn.Linear(16, 34), nn.Linear(34, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outer(torch.relu(self.inner(self.norm(x))))


class Net(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.seen = []

    def configure_model(self) -> None:
        if hasattr(self, "body"):
            return
        with torch.device("meta"):
            self.body = nn.Sequential(nn.Linear(8, 16), *[Block() for _ in range(3)], nn.Linear(16, 4))
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if "bf16" in options else MixedPrecisionPolicy()
        for block in self.body:
            if tensor > 1 and isinstance(block, Block):
                plan = {"inner": ColwiseParallel(), "outer": RowwiseParallel()}
                parallelize_module(block, self.device_mesh["tensor_parallel"], plan)
            fully_shard(block, mesh=self.device_mesh["data_parallel"], mp_policy=policy)
        fully_shard(self.body, mesh=self.device_mesh["data_parallel"], mp_policy=policy)
        torch.manual_seed(0)  # with which Lightning initializes the parameters that it allocates

    def training_step(self, batch, index):  # type: ignore[no-untyped-def]
        x, y = batch
        loss = F.cross_entropy(self.body(x).float(), y)
        self.seen.append(float(loss.detach()))
        return loss

    def configure_optimizers(self):  # type: ignore[no-untyped-def]
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fit(epochs, **more):  # type: ignore[no-untyped-def]
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2 * tensor,
        strategy=ModelParallelStrategy(2, tensor, save_distributed_checkpoint="one-file" not in options),
        max_epochs=epochs,
        accumulate_grad_batches=2 if "accumulate" in options else 1,
        gradient_clip_val=None,
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    net = Net()
    trainer.fit(net, loader, **more)
    return trainer, net


torch.manual_seed(1)
loader = DataLoader(TensorDataset(torch.randn(64, 8), torch.randint(0, 4, (64,))), batch_size=8)
trainer, net = fit(1)
write(folder, net.seen, net, also="first-")
trainer.save_checkpoint(f"{folder}/saved.ckpt")
trainer, net = fit(2, ckpt_path=f"{folder}/saved.ckpt")
write(folder, net.seen, net)
torch.distributed.destroy_process_group()
