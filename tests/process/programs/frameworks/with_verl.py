"""The parts of verl that shard, train, clip, save and export an actor, in the order in which its engine calls them.

with_verl.py FOLDER fsdp|fsdp2 [lora]
"""

import sys

import numpy
import torch
import torch.distributed as dist
from outcome import write
from transformers import LlamaConfig, LlamaForCausalLM
from verl.plugin.platform import set_platform
from verl.plugin.platform.platform_cuda import PlatformCUDA


class OnCPU(PlatformCUDA):
    """What makes verl accept a CPU."""

    device_name, device_module = "cpu", torch.cpu

    def is_available(self) -> bool:
        return False

    def current_device(self) -> str:
        return "cpu"

    def empty_cache(self) -> None:
        pass


torch.cpu.empty_cache = lambda: None
set_platform(OnCPU())

from torch.distributed.fsdp import (  # noqa: E402
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
)
from verl.utils import fsdp_utils  # noqa: E402
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager  # noqa: E402

folder, strategy, *options = sys.argv[1:]
dist.init_process_group("gloo")
rank, lora = dist.get_rank(), "lora" in options
mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def build():  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    with fsdp_utils.get_init_weight_context_manager(use_meta_tensor=strategy == "fsdp2", mesh=mesh)():
        model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))
        if lora:
            from peft import LoraConfig, get_peft_model

            model.enable_input_require_grads()
            model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    if strategy == "fsdp2":
        full_state = model.state_dict()
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=True)
        settings = {"mesh": mesh, "mp_policy": policy, "offload_policy": None, "reshard_after_forward": True}
        fsdp_utils.apply_fsdp2(model, settings, {"forward_prefetch": True})
        fsdp_utils.fsdp2_load_full_state_dict(model, full_state, mesh, None)
        return model
    return FullyShardedDataParallel(
        model,
        param_init_fn=fsdp_utils.init_fn,
        auto_wrap_policy=fsdp_utils.get_fsdp_wrap_policy(model, is_lora=lora),
        device_id=torch.device("cpu"),
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        mixed_precision=MixedPrecision(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.float32
        ),
        sync_module_states=False,  # of an accelerator only, in torch
        device_mesh=mesh,
        forward_prefetch=False,
        use_orig_params=lora,
        cpu_offload=None,
    )


def managed(model):  # type: ignore[no-untyped-def]
    optimizer = torch.optim.AdamW((each for each in model.parameters() if each.requires_grad), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    return optimizer, scheduler, FSDPCheckpointManager(model, optimizer, scheduler)


generator = torch.Generator().manual_seed(7 + rank)
seen = []


def train(model, optimizer, scheduler, steps):  # type: ignore[no-untyped-def]
    model.train()
    for _ in range(steps):
        fsdp_utils.load_fsdp_model_to_gpu(model)
        fsdp_utils.load_fsdp_optimizer(optimizer, "cpu")
        optimizer.zero_grad()
        for _ in range(2):
            words = torch.randint(0, 64, (2, 12), generator=generator)
            loss = model(input_ids=words, labels=words, use_cache=False).loss / 2
            loss.backward()
            seen.append(float(loss.detach()))
        if strategy == "fsdp2":  # FSDP1 adds up norms in the order of a set
            norm = fsdp_utils.fsdp2_clip_grad_norm_(model.parameters(), max_norm=0.5)
            seen.append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))
        optimizer.step()
        scheduler.step()
        fsdp_utils.offload_fsdp_model_to_cpu(model)
        fsdp_utils.offload_fsdp_optimizer(optimizer)


def evaluate(model):  # type: ignore[no-untyped-def]
    model.eval()
    with torch.no_grad():
        words = torch.arange(24).reshape(2, 12)
        seen.append(float(model(input_ids=words, labels=words, use_cache=False).loss))
    if strategy == "fsdp":
        model._handle.reshard(True)  # as its context of evaluation does when it ends
    else:
        model.reshard()


def sums(state):  # type: ignore[no-untyped-def]
    seen.append(len(state))
    seen.extend(float(state[name].double().sum()) for name in sorted(state))


model = build()
optimizer, scheduler, manager = managed(model)
train(model, optimizer, scheduler, 2)
evaluate(model)
manager.save_checkpoint(f"{folder}/actor", global_step=2)
sums(fsdp_utils.get_fsdp_full_state_dict(model, rank0_only=True))
if lora:
    sums(fsdp_utils.collect_lora_params(model, layered_summon=True, base_sync_done=True))
    sums(fsdp_utils.collect_merged_lora_params(model))
if strategy == "fsdp":
    kept = fsdp_utils.fsdp1_sharded_save_to_cpu(model)
else:
    kept, spec = fsdp_utils.fsdp2_sharded_save_to_cpu(model)
numpy.random.seed(rank)
train(model, optimizer, scheduler, 1)
if strategy == "fsdp":
    fsdp_utils.fsdp1_sharded_load_from_cpu(model, kept)
else:
    fsdp_utils.fsdp2_sharded_load_from_cpu(model, kept, spec)
evaluate(model)
again = build()
optimizer, scheduler, manager = managed(again)
manager.load_checkpoint(f"{folder}/actor")
train(again, optimizer, scheduler, 2)
evaluate(again)
write(folder, seen, model, again)
dist.destroy_process_group()
