"""Save, resume and export. Run it twice, with any number of processes each time:
`torchrun --nproc-per-node=2 -m flatfsdp.examples.resume`, then `--nproc-per-node=3`.

The second run continues where the first ended. Folders are made in the working directory.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from flatfsdp import FullyShardedDataParallel, checkpoint

FOLDER = Path(os.environ.get("FLATFSDP_EXAMPLE", "resume-example"))
STEPS = 50  # of each run


def main() -> None:
    """Learn the sine of a sum, for some more steps."""
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if device.type != "cpu":
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()

    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))
    model = FullyShardedDataParallel(layers, auto_wrap_policy={nn.Linear}, use_orig_params=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    done = 0
    if (FOLDER / "latest").exists():
        done = checkpoint.load(FOLDER / "latest", model=model, optimizer=optimizer)["step"]
        if dist.get_rank() == 0:
            print(f"resumed after step {done}")
    loss = torch.zeros(())
    for step in range(done, done + STEPS):
        torch.manual_seed(1000 * step + dist.get_rank())
        x = torch.randn(64, 8, device=device)
        loss = (model(x) - x.sum(1, keepdim=True).sin()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    extra = {"step": done + STEPS}
    checkpoint.save(FOLDER / "latest", model=model, optimizer=optimizer, extra=extra, overwrite=True)
    checkpoint.export_safetensors(model, FOLDER / "export", overwrite=True)
    if dist.get_rank() == 0:
        print(f"saved after step {done + STEPS}: loss {loss.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
