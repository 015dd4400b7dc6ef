"""torchtitan's Llama 3, or its Qwen 3 with experts, as its trainer builds, shards, initializes, trains and clips it.

with_torchtitan.py FOLDER STRATEGY [OPTION...]
STRATEGY: fsdp | hsdp | tp (with FSDP) | hsdp-tp | pp (with FSDP) |
etp (experts, with FSDP and TP)
OPTION: experts | full-dtensor | float8 | lora | ac | bf16 | tied | accumulate | no-sp | always | schedule=NAME |
from=CHECKPOINT | save
"""

import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torchtitan.tools.utils as titan_utils
from outcome import write
from torch.distributed._composable.fsdp import FSDPModule

titan_utils.device_type, titan_utils.device_module = "cpu", torch.cpu  # it takes CUDA where there is no accelerator

from torchtitan.components.checkpointer.base import ModelWrapper  # noqa: E402
from torchtitan.components.loss import cross_entropy_loss  # noqa: E402
from torchtitan.components.optimizer.utils import (  # noqa: E402
    get_flat_optim_state_dict,
    init_optim_state,
    load_flat_optim_state_dict,
)
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.distributed import ParallelDims, full_dtensor  # noqa: E402
from torchtitan.distributed import utils as dist_utils  # noqa: E402
from torchtitan.distributed.activation_checkpoint import FullAC  # noqa: E402
from torchtitan.models import llama3, qwen3  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3.sharding import set_llama3_sharding_config  # noqa: E402
from torchtitan.models.qwen3.sharding import set_qwen3_sharding_config  # noqa: E402

folder, strategy, *options = sys.argv[1:]
LAYERS, WORDS, LENGTH, BATCH, STEPS = 2, 2048, 16, 2, 3
SIZES = {
    "fsdp": (1, 2, 1, 1, 1), "hsdp": (2, 2, 1, 1, 1), "tp": (1, 2, 2, 1, 1), "pp": (1, 2, 1, 2, 1),
    "hsdp-tp": (2, 2, 2, 1, 1), "etp": (1, 2, 2, 1, 2),
}  # fmt: skip

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
replicate, shard, tp, pp, ep = SIZES[strategy]
parallelism = ParallelismConfig(
    data_parallel_replicate_degree=replicate,
    data_parallel_shard_degree=shard,
    tensor_parallel_degree=tp,
    pipeline_parallel_degree=pp,
    expert_parallel_degree=ep,
    pipeline_parallel_schedule=next((o[9:] for o in options if o.startswith("schedule=")), "1F1B"),
    spmd_backend="full_dtensor" if "full-dtensor" in options else "partial_dtensor",
    enable_sequence_parallel="no-sp" not in options,
    fsdp_reshard_after_forward="always" if "always" in options else "default",
)
training = TrainingConfig(
    local_batch_size=BATCH, seq_len=LENGTH, mixed_precision_param="bfloat16" if "bf16" in options else "float32"
)
dims = ParallelDims.from_config(parallelism, world)
dims.build_mesh()
dist_utils.set_spmd_backend(parallelism.spmd_backend)

converters = []
if "float8" in options:
    from torchtitan.components.quantization import Float8LinearConverter

    converters.append(Float8LinearConverter.Config(emulate=True, filter_fqns=["lm_head"]))
if "lora" in options:
    from torchtitan.components.lora import LoRAConverter

    converters.append(LoRAConverter.Config(rank=4, alpha=8.0))
if "experts" in options:
    spec = qwen3.model_registry("debugmodel_moe")
    spec.model.layers = qwen3._build_qwen3_moe_layers(
        n_layers=LAYERS, dim=256, n_heads=4, n_kv_heads=2, head_dim=128, moe_hidden_dim=64, num_experts=8, top_k=2,
        attn_backend="flex", moe_comm_backend="standard",
        rope=qwen3.CosSinRoPE.Config(dim=128, max_seq_len=4096, theta=1000000.0),
    )  # fmt: skip
else:
    spec = llama3.model_registry("debugmodel", converters=converters)
    spec.model.layers = spec.model.layers[:LAYERS]
config = spec.model
config.enable_weight_tying = "tied" in options
for layer in config.layers:
    layer.attention.inner_attention = ScaledDotProductAttention.Config()  # flex attention has to be compiled
if "experts" in options:
    set_qwen3_sharding_config(config, enable_sp=parallelism.enable_sequence_parallel, enable_ep=ep > 1)
else:
    set_llama3_sharding_config(config, enable_sp=parallelism.enable_sequence_parallel)
torch.manual_seed(0)
with torch.device("meta"):
    model = config.build()
settings = {
    "parallel_dims": dims,
    "training": training,
    "parallelism": parallelism,
    "compile_config": CompileConfig(),
    "ac_config": FullAC.Config() if "ac" in options else None,
    "dump_folder": folder,
}


TOKENS = BATCH * LENGTH * replicate * shard


def loss_of(prediction, labels):  # type: ignore[no-untyped-def]
    return cross_entropy_loss(prediction, labels, global_vocab_size=WORDS) / TOKENS, {}


schedule = None
if pp > 1:
    schedule, parts, has_first, has_last = spec.pipelining_fn(
        model,
        device=torch.device("cpu"),
        model_config=config,
        parallelize_fn=spec.parallelize_fn,
        loss_fn=loss_of,
        **settings,
    )
else:
    parts = [spec.parallelize_fn(model, **settings)]
for part in parts:
    part.to_empty(device="cpu")
    with torch.no_grad():
        part.init_weights(buffer_device=None)
    part.train()
    for module in part.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # torch's cannot divide by torchtitan's 1.0 on gloo
named = [(name, parameter) for part in parts for name, parameter in part.named_parameters()]
optimizer = torch.optim.AdamW([each for each in named if each[1].requires_grad], lr=1e-2)
init_optim_state(optimizer)
wrapped = ModelWrapper(parts)

for option in options:
    if option.startswith("from="):
        weights, states = wrapped.state_dict(), get_flat_optim_state_dict(optimizer)
        dcp.load({"model": weights, "optimizer": states}, checkpoint_id=option[5:])
        wrapped.load_state_dict(weights)
        load_flat_optim_state_dict(optimizer, states)

generator = torch.Generator().manual_seed(100 + dims.get_mesh("batch").get_local_rank())
seen = []
for _ in range(STEPS):
    optimizer.zero_grad()
    for _ in range(2 if "accumulate" in options else 1):
        batch = torch.randint(0, WORDS, (BATCH, LENGTH + 1), generator=generator)
        inputs, labels, more = batch[:, :-1], batch[:, 1:].contiguous(), {"positions": torch.arange(LENGTH)[None]}
        if "full-dtensor" in options:
            inputs, labels, more = full_dtensor.parallelize_inputs(dims, inputs, labels, {})
        if schedule is not None:
            losses = []
            given = (inputs,) if has_first else ()
            schedule.step(*given, **({"target": labels, "losses": losses} if has_last else {}), return_outputs=False)
            seen.append(float(sum(losses)))
        else:
            loss, _ = loss_of(parts[0](inputs, **({} if "full-dtensor" in options else more)), labels)
            loss.backward()
            seen.append(float(loss.detach().to_local() if hasattr(loss, "to_local") else loss.detach()))
    norm = dist_utils.clip_grad_norm_(
        [p for part in parts for p in part.parameters()],
        1.0,
        foreach=True,
        pp_mesh=dims.get_optional_mesh("pp"),
        ep_enabled=dims.ep_enabled,
    )
    seen.append(float(norm))
    optimizer.step()

if "save" in options:
    state = {"model": wrapped.state_dict(), "optimizer": get_flat_optim_state_dict(optimizer)}
    dcp.save(state, checkpoint_id=f"{folder}/checkpoint")
write(folder, seen, *parts)
dist.destroy_process_group()
