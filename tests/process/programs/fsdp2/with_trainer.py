"""The Trainer of transformers with `fsdp_config` of version 2: six steps, and the last three again from its checkpoint.

with_trainer.py FOLDER STATE_DICT_TYPE [OPTION...]        OPTION: tied | ac | bf16 | eager
"""

import sys

import torch
from accelerate.utils import DistributedType
from outcome import write
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

folder, kind, *options = sys.argv[1:]
torch.manual_seed(1)
rows = [torch.randint(0, 64, (16,)) for _ in range(48)]
data = [{"input_ids": row, "labels": row} for row in rows]


def train(also, **more):  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=64, max_position_embeddings=64, tie_word_embeddings="tied" in options, **sizes)
    model = LlamaForCausalLM(config)
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=6,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        logging_steps=1,
        save_steps=3,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        seed=3,
        bf16="bf16" in options,
        fsdp=True,
        fsdp_config={
            "version": 2,
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "state_dict_type": kind,
            "reshard_after_forward": True,
            "cpu_ram_efficient_loading": "eager" not in options,
            "activation_checkpointing": "ac" in options,
        },
    )
    arguments.distributed_state.distributed_type = DistributedType.MULTI_GPU  # what makes it accept a CPU
    trainer = Trainer(model=model, args=arguments, train_dataset=data)
    trainer.train(**more)
    keys = ("loss", "grad_norm")
    seen = [float(entry[key]) for entry in trainer.state.log_history for key in keys if key in entry]
    write(folder, seen, trainer.model, also=also)


train("first-")
train("", resume_from_checkpoint=f"{folder}/checkpoint-3")
torch.distributed.destroy_process_group()
