"""TRL's SFTTrainer or DPOTrainer, with PEFT's LoRA or without, and `fsdp_config` of version 2.

with_trl.py FOLDER sft|dpo [OPTION...]      OPTION: lora | bf16 | packed | ac
With lora, dpo's reference is the model with its adapter disabled, whose forward runs between another and its backward.
"""

import sys

import torch
import torch.distributed as dist
from accelerate.utils import DistributedType
from datasets import Dataset
from outcome import write
from peft import LoraConfig
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from tests.harness.tiny_hub import write_llama

folder, task, *options = sys.argv[1:]
whole = f"{folder}/whole"
dist.init_process_group("gloo")
if dist.get_rank() == 0:
    write_llama(whole)
dist.barrier()
Trained, Config = (SFTTrainer, SFTConfig) if task == "sft" else (DPOTrainer, DPOConfig)
settings = {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], "state_dict_type": "FULL_STATE_DICT"}
settings |= {"version": 2, "cpu_ram_efficient_loading": True}
arguments = Config(
    output_dir=folder,
    max_steps=4,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
    learning_rate=1e-2,
    logging_steps=1,
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
    use_cpu=True,
    seed=3,
    bf16="bf16" in options,
    max_length=48,
    fsdp=True,
    fsdp_config=settings,
    **({"packing": True} if "packed" in options else {}),
    **({"gradient_checkpointing": True} if "ac" in options else {}),
)
arguments.distributed_state.distributed_type = DistributedType.MULTI_GPU  # makes it accept a CPU
if task == "sft":
    rows = [{"prompt": f"what is {n}?", "completion": f" {n} is a number"} for n in range(32)]
else:
    rows = [{"prompt": f"what is {n}?", "chosen": f" {n}, a number", "rejected": f" {n + 1}"} for n in range(32)]
trainer = Trained(
    model=LlamaForCausalLM.from_pretrained(whole, dtype=torch.float32),
    args=arguments,
    train_dataset=Dataset.from_list(rows),
    processing_class=PreTrainedTokenizerFast.from_pretrained(whole),
    peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"]) if "lora" in options else None,
)
trainer.train()
keys = ("loss", "grad_norm", "rewards/margins")
seen = [float(entry[key]) for entry in trainer.state.log_history for key in keys if key in entry]
trainer.save_model(f"{folder}/trained")
write(folder, seen, trainer.model)
dist.destroy_process_group()
