"""The Trainer of transformers on a LLaMA: six steps, and the last three again from its checkpoint.

with_trainer.py ddp FOLDER | STATE_DICT_TYPE FOLDER
"""

import sys

import torch
from accelerate.utils import DistributedType
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

kind, folder = sys.argv[1:]
torch.manual_seed(1)
rows = [torch.randint(0, 64, (16,)) for _ in range(48)]
data = [{"input_ids": row, "labels": row} for row in rows]


def train(**more):  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=64, **sizes))
    fsdp = {
        "fsdp": True,
        "fsdp_config": {
            "version": 1,
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "state_dict_type": kind,
            "use_orig_params": True,
            "sync_module_states": False,
            "cpu_ram_efficient_loading": False,
        },
    }
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=6,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        logging_steps=1,
        save_steps=3,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        seed=3,
        **({} if kind == "ddp" else fsdp),
    )
    if kind != "ddp":
        arguments.distributed_state.distributed_type = DistributedType.MULTI_GPU  # makes it accept a CPU
    trainer = Trainer(model=model, args=arguments, train_dataset=data)
    trainer.train(**more)
    if trainer.is_world_process_zero():
        print("MODEL", type(trainer.model_wrapped).__module__)
        for entry in trainer.state.log_history:
            if "loss" in entry:
                print("LOSS", f"{entry['loss']:.6f}")


train()
train(resume_from_checkpoint=f"{folder}/checkpoint-3")
