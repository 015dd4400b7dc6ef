"""The Trainer of transformers with `fsdp_config` of version 2: six steps, and the last three again from its
checkpoint; the files of `save_model`.

with_trainer.py FOLDER STATE_DICT_TYPE [OPTION...]
OPTION: tied | lora | ac | bf16 | eager | offload | evaluate
"""

import sys

import torch
import torch.distributed as dist
from accelerate.utils import DistributedType
from outcome import write
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

folder, kind, *options = sys.argv[1:]
adapted = "lora" in options
torch.manual_seed(1)
rows = [torch.randint(0, 64, (16,)) for _ in range(48)]
data = [{"input_ids": row, "labels": row} for row in rows]


def build():  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=64, max_position_embeddings=64, tie_word_embeddings="tied" in options, **sizes)
    model = LlamaForCausalLM(config)
    if not adapted:
        return model
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"]))


def train(also, **more):  # type: ignore[no-untyped-def]
    settings = {
        "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "state_dict_type": kind,
        "activation_checkpointing": "ac" in options,
        "version": 2,
        "reshard_after_forward": True,
        "cpu_ram_efficient_loading": "eager" not in options,
        "cpu_offload": "offload" in options,
    }
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=6,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        logging_steps=1,
        save_steps=3,
        eval_strategy="steps" if "evaluate" in options else "no",
        eval_steps=2,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        seed=3,
        bf16="bf16" in options,
        fsdp=True,
        fsdp_config=settings,
    )
    arguments.distributed_state.distributed_type = DistributedType.MULTI_GPU  # makes it accept a CPU
    trainer = Trainer(model=build(), args=arguments, train_dataset=data, eval_dataset=data[:8])
    trainer.train(**more)
    keys = ("loss", "grad_norm", "eval_loss")
    seen = [float(entry[key]) for entry in trainer.state.log_history for key in keys if key in entry]
    if kind == "FULL_STATE_DICT":
        from safetensors.torch import load_file

        trainer.save_model(f"{folder}/{also}model")
        dist.barrier()
        name = "adapter_model" if adapted else "model"
        written = load_file(f"{folder}/{also}model/{name}.safetensors")
        seen += [written[each].double().sum().item() for each in sorted(written)]
    write(folder, seen, trainer.model, also=also)


train("first-")
train("", resume_from_checkpoint=f"{folder}/checkpoint-3")
dist.destroy_process_group()
