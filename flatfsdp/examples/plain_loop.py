"""A plain training loop. Run it with `torchrun --nproc-per-node=2 -m flatfsdp.examples.plain_loop`.

Every rank runs this file on data of its own. On a machine with GPUs each rank takes one, else all compute on the CPU.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn

import flatfsdp
from flatfsdp import FullyShardedDataParallel


class Block(nn.Module):
    """Two linear layers around a nonlinearity, added to the input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


def main() -> None:
    """Learn the sine of a sum, on every rank together."""
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if device.type != "cpu":
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()

    torch.manual_seed(0)  # every rank begins with the same values
    layers = nn.Sequential(nn.Linear(8, 32), Block(32), Block(32), nn.Linear(32, 1))
    model = FullyShardedDataParallel(layers, auto_wrap_policy={Block}, use_orig_params=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    if dist.get_rank() == 0:
        print(flatfsdp.summary(model))

    torch.manual_seed(1 + dist.get_rank())  # and sees different data
    for step in range(201):
        x = torch.randn(64, 8, device=device)
        loss = (model(x) - x.sum(1, keepdim=True).sin()).square().mean()
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0 and dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
