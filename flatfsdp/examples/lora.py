"""A frozen base with trainable low-rank additions: `torchrun --nproc-per-node=2 -m flatfsdp.examples.lora`.

Frozen and trainable parameters share a unit. Frozen ones are sharded and gathered like the others; they have no
gradients and no optimizer state, and are not reduced.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

import flatfsdp
from flatfsdp import FullyShardedDataParallel


class LoRA(nn.Module):
    """A frozen linear layer plus `up(down(x))`, which starts at zero."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def main() -> None:
    """Train a frozen network for another function."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    pretrained = nn.Sequential(nn.Linear(8, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 1))
    adapted = nn.Sequential(*(LoRA(m, rank=4) if isinstance(m, nn.Linear) else m for m in pretrained))
    model = FullyShardedDataParallel(adapted, auto_wrap_policy={LoRA}, use_orig_params=True)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    figures = flatfsdp.stats(model)

    torch.manual_seed(1 + dist.get_rank())
    for step in range(101):
        x = torch.randn(128, 8)
        loss = (model(x) - torch.tanh(x[:, :1] * x[:, 1:2])).square().mean()
        loss.backward()
        if step % 50 == 0 and dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.3f}, {figures.bytes_grads:,} bytes of gradients")
        optimizer.step()
        optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(flatfsdp.summary(model))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
