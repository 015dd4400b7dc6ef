"""Lightning: an epoch, a checkpoint, and a second epoch from it.

with_lightning.py ddp | full FOLDER | sharded FOLDER
"""

import sys

import lightning
import torch
from lightning.pytorch.strategies import FSDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

kind, folder = [*sys.argv[1:], ""][:2]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outer(torch.relu(self.inner(x)))


class Net(lightning.LightningModule):
    def configure_model(self) -> None:
        torch.manual_seed(0)
        self.body = nn.Sequential(*[Block() for _ in range(3)], nn.Linear(16, 4))

    def training_step(self, batch, index):  # type: ignore[no-untyped-def]
        x, y = batch
        loss = nn.functional.cross_entropy(self.body(x), y)
        mean = self.all_gather(loss.detach()).mean().item()
        if self.global_rank == 0:
            print("LOSS", f"{mean:.6f}")
        return loss

    def configure_optimizers(self):  # type: ignore[no-untyped-def]
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class OnCPU(FSDPStrategy):
    """A class that Lightning accepts on a CPU: it refuses the base class there."""


def fit(epochs, **more):  # type: ignore[no-untyped-def]
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp" if kind == "ddp" else OnCPU(auto_wrap_policy={Block}, state_dict_type=kind),
        max_epochs=epochs,
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(Net(), loader, **more)
    return trainer


torch.manual_seed(1)
loader = DataLoader(TensorDataset(torch.randn(64, 16), torch.randint(0, 4, (64,))), batch_size=8)
if kind == "ddp":
    trainer = fit(2)
else:
    trainer = fit(1)
    trainer.save_checkpoint(f"{folder}/saved.ckpt")
    trainer = fit(2, ckpt_path=f"{folder}/saved.ckpt")
if trainer.global_rank == 0:
    print("MODEL", type(trainer.strategy.model).__module__)
