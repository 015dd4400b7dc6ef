"""Writes what `tests/distributed/repository/test_old_pickles.py` reads:
pickles of another revision of flatfsdp, in which its modules had
other names.

    git worktree add /tmp/e07bc83 e07bc83
    PYTHONPATH=/tmp/e07bc83 python tests/distributed/repository/pickles_of_e07bc83/write.py

Two ranks of gloo write a file each: a wrapped model, a sharded state dict, and settings.
"""

from __future__ import annotations

import pickle
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

FOLDER = Path(__file__).resolve().parent


def a_model() -> nn.Module:
    """Wrapped in two units, with a setting of each kind that pickles hold."""
    from flatfsdp import FullyShardedDataParallel as FSDP
    from flatfsdp import MixedPrecision, ShardingStrategy

    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    plain[0] = FSDP(plain[0], use_orig_params=True, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
    return FSDP(plain, use_orig_params=True, mixed_precision=MixedPrecision(param_dtype=torch.float32))


def settings() -> list[Any]:
    """Objects of flatfsdp that users keep in settings of their own."""
    import flatfsdp
    from flatfsdp.wrap import ModuleWrapPolicy

    return [
        flatfsdp.ShardingStrategy.HYBRID_SHARD,
        flatfsdp.MixedPrecision(reduce_dtype=torch.float64),
        flatfsdp.CPUOffload(offload_params=True),
        flatfsdp.StateDictType.SHARDED_STATE_DICT,
        flatfsdp.FullStateDictConfig(rank0_only=True),
        flatfsdp.ShardedOptimStateDictConfig(offload_to_cpu=True),
        flatfsdp.OptimStateKeyType.PARAM_NAME,
        ModuleWrapPolicy({nn.Linear}),
    ]


def _write(rank: int, meeting: str) -> None:
    from flatfsdp import FullyShardedDataParallel as FSDP
    from flatfsdp import StateDictType

    dist.init_process_group("gloo", store=dist.FileStore(meeting, 2), rank=rank, world_size=2)
    model = a_model()
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        torch.save(model.state_dict(), FOLDER / f"state{rank}.pt")
    (FOLDER / f"model{rank}.pickle").write_bytes(pickle.dumps(model))
    if rank == 0:
        (FOLDER / "settings.pickle").write_bytes(pickle.dumps(settings()))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as meeting:
        mp.spawn(_write, (f"{meeting}/store",), nprocs=2)
