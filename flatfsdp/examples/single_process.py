"""One process without a launcher: `python -m flatfsdp.examples.single_process`.

For debugging, notebooks and tests: the program is the same as on many ranks, with a process group of one.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from flatfsdp import FullyShardedDataParallel


def main() -> None:
    """Fit a line."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(0)
    model = FullyShardedDataParallel(nn.Linear(1, 1), device_id=torch.device("cpu"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.linspace(-1, 1, 32).unsqueeze(1)
    for _ in range(200):
        loss = (model(x) - (2 * x + 1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with FullyShardedDataParallel.summon_full_params(model):
        slope, offset = (parameter.item() for parameter in model.parameters())
        print(f"y = {slope:.2f} x + {offset:.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
