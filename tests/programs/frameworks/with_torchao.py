"""torchao's float8 training of linear layers, with or without gathering them in float8.

with_torchao.py FOLDER [OPTION...]      OPTION: gather (in float8, which torch's FSDP2 cannot on gloo) | clip |
tp (with FSDP)
"""

import sys

import torch
import torch.distributed as dist
from outcome import write
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torchao.float8 import Float8LinearConfig, convert_to_float8_training, precompute_float8_dynamic_scale_for_fsdp

folder, *options = sys.argv[1:]
dist.init_process_group("gloo")
whole = dist.init_device_mesh("cpu", (2, 2 if "tp" in options else 1), mesh_dim_names=("dp", "tp"))
mesh = whole["dp"]
torch.manual_seed(0)
layers = [nn.Linear(32, 64, bias=False), nn.ReLU(), nn.Linear(64, 32, bias=False), nn.ReLU(), nn.Linear(32, 16)]
model = nn.Sequential(*layers)
config = Float8LinearConfig(enable_fsdp_float8_all_gather="gather" in options, emulate=True)
convert_to_float8_training(model, config=config, module_filter_fn=lambda module, name: name != "4")
if "tp" in options:
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel(), "4": ColwiseParallel(output_layouts=Replicate())}
    parallelize_module(model, whole["tp"], plan, src_data_rank=None)
for name in ("0", "2"):
    fully_shard(model.get_submodule(name), mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach="tp" not in options)
if {"gather", "tp"} <= {*options}:  # else torchao's first scales are those of each part of a weight
    precompute_float8_dynamic_scale_for_fsdp(model)
seen = []
for step in range(4):
    generator = torch.Generator().manual_seed(10 * step + mesh.get_local_rank())
    loss = model(torch.randn(16, 32, generator=generator)).square().mean()
    loss.backward()
    seen.append(float(loss.detach()))
    if "clip" in options:
        seen.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05).full_tensor()))
    optimizer.step()
    optimizer.zero_grad()
    if "gather" in options:
        precompute_float8_dynamic_scale_for_fsdp(model)
write(folder, seen, model)
dist.destroy_process_group()
