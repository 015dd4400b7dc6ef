"""transformers' own FSDP, which a `DistributedConfig` selects: a model is loaded sharded and trained, its checkpoint
is written by all ranks, and loaded.

with_transformers.py FOLDER SIZE [OPTION...]
SIZE: fsdp=2 | tp=2 | replicate=2, several of them. OPTION: moe | tied | bf16 | trainer
"""

import sys

import torch
import torch.distributed as dist
from outcome import write
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.distributed import DistributedConfig

folder, *options = sys.argv[1:]
sizes = dict(option.split("=") for option in options if "=" in option)
dist.init_process_group("gloo")
rank = dist.get_rank()
config = LlamaConfig(
    vocab_size=64, max_position_embeddings=64, tie_word_embeddings="tied" in options, hidden_size=32,
    intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
)  # fmt: skip
if rank == 0:
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(f"{folder}/whole")
dist.barrier()
distributed = DistributedConfig(
    fsdp_size=int(sizes.get("fsdp", 1)),
    tp_size=int(sizes.get("tp", 1)),
    dp_replicate_size=int(sizes.get("replicate", 1)),
    fsdp_mixed_precision="bf16" in options,
    **({"tp_plan": "auto"} if "tp" in sizes else {}),
)


def load(path):  # type: ignore[no-untyped-def]
    return AutoModelForCausalLM.from_pretrained(path, distributed_config=distributed, dtype=torch.float32)


model = load(f"{folder}/whole")
model.train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
generator = torch.Generator().manual_seed(7 + rank // int(sizes.get("tp", 1)))
seen = []
for _ in range(4):
    for last in (False, True):
        model.set_requires_gradient_sync(last)
        words = torch.randint(0, 64, (2, 12), generator=generator)
        loss = model(input_ids=words, labels=words).loss
        loss.backward()
        seen.append(float(loss.detach()))
    if "tp" not in sizes:  # then some are on a mesh of their own, which torch's function cannot add up
        seen.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()))
    optimizer.step()
    optimizer.zero_grad()
write(folder, seen, model)
model.save_pretrained(f"{folder}/sharded")
dist.barrier()
again = load(f"{folder}/sharded")
write(folder, [], again, also="again-")
dist.destroy_process_group()
