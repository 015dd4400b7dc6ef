"""Accelerate with `fsdp_version=2`: meta load from rank 0, accumulation, clipping, a scheduler; `save_state`, and
`load_state` in a new process.

with_accelerate.py FOLDER STATE_DICT_TYPE [OPTION...]     OPTION: llama | tied | ac | bf16 | eager | keep | save | load
"""

import sys

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from outcome import write
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

folder, kind, *options = sys.argv[1:]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner, self.outer = nn.LayerNorm(16), nn.Linear(16, 33), nn.Linear(33, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outer(torch.relu(self.inner(self.norm(x))))


def build() -> nn.Module:
    torch.manual_seed(0)
    if "llama" not in options:
        return nn.Sequential(nn.Linear(8, 16), *[Block() for _ in range(3)], nn.Linear(16, 5))
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=65, tie_word_embeddings="tied" in options, **sizes))


PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU  # what makes Accelerate accept a CPU
plugin = FullyShardedDataParallelPlugin(
    fsdp_version=2,
    auto_wrap_policy="transformer_based_wrap",
    transformer_cls_names_to_wrap=["LlamaDecoderLayer" if "llama" in options else "Block"],
    state_dict_type=kind,
    cpu_ram_efficient_loading="eager" not in options,
    activation_checkpointing="ac" in options,
    reshard_after_forward="keep" not in options,
)
accelerator = Accelerator(
    fsdp_plugin=plugin, gradient_accumulation_steps=2, mixed_precision="bf16" if "bf16" in options else "no"
)
net = build()
torch.manual_seed(1)
if "llama" in options:
    words = torch.randint(0, 65, (80, 12))
    data = TensorDataset(words, words)
else:
    data = TensorDataset(torch.randn(80, 8), torch.randint(0, 5, (80,)))
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
model, optimizer, loader, scheduler = accelerator.prepare(net, optimizer, DataLoader(data, batch_size=4), scheduler)
seen = []


def train(batches):  # type: ignore[no-untyped-def]
    for x, y in batches:
        with accelerator.accumulate(model):
            if "llama" in options:
                loss = model(input_ids=x, labels=y).loss
            else:
                loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                seen.append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        seen.append(float(loss.detach()))


batches = list(loader)
if "load" in options:
    accelerator.load_state(f"{folder}/state")
    assert optimizer.state_dict()["state"], "the optimizer of a new process has nothing to resume from"
else:
    train(batches[:6])
    if "save" in options:
        accelerator.save_state(f"{folder}/state")
if "save" not in options:
    train(batches[6:])
    state = accelerator.get_state_dict(model)
    seen += [value.double().sum().item() for value in state.values()]
write(folder, seen, model, also="saved-" if "save" in options else "")
accelerator.end_training()
