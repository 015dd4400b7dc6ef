"""Accelerate with `fsdp_version=2`, or 1: meta load from rank 0, accumulation, clipping, a scheduler; `save_state`, and
`load_state` in a new process.

with_accelerate.py FOLDER STATE_DICT_TYPE [OPTION...]
OPTION: v1 | flat | unclipped | llama | tied | lora | ac | bf16 | eager | keep | size | offload | hsdp |
weights | save | load[=FOLDER OF ANOTHER]
"""

import sys

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from outcome import write
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

folder, kind, *options = sys.argv[1:]
loads = next((each for each in options if each.startswith("load")), None)
version = 1 if "v1" in options else 2
language = "llama" in options


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner, self.outer = nn.LayerNorm(16), nn.Linear(16, 33), nn.Linear(33, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outer(torch.relu(self.inner(self.norm(x))))


def build() -> nn.Module:
    torch.manual_seed(0)
    if not language:
        return nn.Sequential(nn.Linear(8, 16), *[Block() for _ in range(3)], nn.Linear(16, 5))
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=65, tie_word_embeddings="tied" in options, **sizes))
    if "lora" in options:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(2)
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"]))
    return model


PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU  # makes Accelerate accept a CPU
if version == 1:
    own = {
        "use_orig_params": "flat" not in options,
        "reshard_after_forward": "SHARD_GRAD_OP" if "keep" in options else "FULL_SHARD",
        "sync_module_states": False,  # needs an accelerator in Accelerate
        "cpu_ram_efficient_loading": False,
    }
else:
    own = {"reshard_after_forward": "keep" not in options, "cpu_ram_efficient_loading": "eager" not in options}
plugin = FullyShardedDataParallelPlugin(
    fsdp_version=version,
    auto_wrap_policy="size_based_wrap" if "size" in options else "transformer_based_wrap",
    transformer_cls_names_to_wrap=["LlamaDecoderLayer" if language else "Block"],
    min_num_params=1000,
    state_dict_type=kind,
    activation_checkpointing="ac" in options,
    cpu_offload="offload" in options,
    **own,
)
accelerator = Accelerator(
    fsdp_plugin=plugin,
    gradient_accumulation_steps=2,
    mixed_precision="bf16" if "bf16" in options else "no",
    parallelism_config=ParallelismConfig(dp_replicate_size=2, dp_shard_size=2) if "hsdp" in options else None,
)
net = build()
torch.manual_seed(1)
if language:
    words = torch.randint(0, 65, (160 if "hsdp" in options else 80, 12))
    data = TensorDataset(words, words)
else:
    data = TensorDataset(torch.randn(80, 8), torch.randint(0, 5, (80,)))
loader = DataLoader(data, batch_size=4)
if version == 1:  # whose parameters are others than the model's before
    net = accelerator.prepare(net)
optimizer = torch.optim.AdamW((each for each in net.parameters() if each.requires_grad), lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
model, optimizer, loader, scheduler = accelerator.prepare(net, optimizer, loader, scheduler)
seen = []


def train(batches):  # type: ignore[no-untyped-def]
    for x, y in batches:
        with accelerator.accumulate(model):
            loss = model(input_ids=x, labels=y).loss if language else nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients and "unclipped" not in options:
                seen.append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        seen.append(float(loss.detach()))


batches = list(loader)
if loads is not None:
    accelerator.load_state(f"{loads.partition('=')[2] or folder}/state")
    assert optimizer.state_dict()["state"], "the optimizer of a new process has nothing to resume from"
else:
    train(batches[:6])
    if "save" in options:
        accelerator.save_state(f"{folder}/state")
if "save" not in options:
    train(batches[6:])
    state = accelerator.get_state_dict(model)
    seen += [value.double().sum().item() for value in state.values()]
    if "weights" in options:
        from safetensors.torch import load_file

        accelerator.save_model(model, f"{folder}/weights")
        accelerator.wait_for_everyone()
        seen += [value.double().sum().item() for value in load_file(f"{folder}/weights/model.safetensors").values()]
write(folder, seen, model, also="saved-" if "save" in options else "")
accelerator.end_training()
