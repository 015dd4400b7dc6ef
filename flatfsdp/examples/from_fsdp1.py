"""A program written for torch's FSDP1. `diff from_fsdp1.before.txt from_fsdp1.py` shows the changes of the migration.

Run either with `torchrun --nproc-per-node=2`.
"""

from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from flatfsdp import BackwardPrefetch, MixedPrecision, ShardingStrategy
from flatfsdp import FullyShardedDataParallel as FSDP
from flatfsdp.wrap import transformer_auto_wrap_policy


def main() -> None:
    """A few steps with gradient accumulation on sequences that count upwards."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, nhead=2, dim_feedforward=64, dropout=0.0, batch_first=True)
    layers = nn.Sequential(nn.Embedding(16, 32), nn.TransformerEncoder(layer, 2), nn.Linear(32, 16))
    model = FSDP(
        layers,
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
        auto_wrap_policy=partial(transformer_auto_wrap_policy, transformer_layer_cls={nn.TransformerEncoderLayer}),
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
        mixed_precision=MixedPrecision(reduce_dtype=torch.float32),
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(1 + dist.get_rank())

    def backward() -> torch.Tensor:
        tokens = (torch.randint(16, (8, 1)) + torch.arange(9)) % 16
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        (loss / 2).backward()
        return loss

    for step in range(5):
        with model.no_sync():
            backward()
        loss = backward()
        norm = model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.4f}, gradient norm {norm.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
