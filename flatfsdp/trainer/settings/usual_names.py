"""Names that other trainers give to settings of ours, for the errors about unknown names.

From transformers' TrainingArguments, Lightning, torchtune, torchtitan, Accelerate and nanoGPT.
"""

from __future__ import annotations

_BY_SETTING = {
    "accumulate": "gradient_accumulation_steps accumulate_grad_batches grad_accum grad_accumulation_steps",
    "activation_checkpointing": "gradient_checkpointing enable_activation_checkpointing enable_gradient_checkpointing",
    "batch": "per_device_train_batch_size per_gpu_train_batch_size train_batch_size batch_size micro_batch_size "
    "local_batch_size per_device_eval_batch_size",
    "best_by": "metric_for_best_model monitor",
    "best_mode": "greater_is_better",
    "bf16": "precision mixed_precision",
    "callbacks": "report_to logger metric_logger",
    "clip": "max_grad_norm gradient_clip_val grad_clip clip_grad_norm max_norm gradient_clipping",
    "compile": "torch_compile",
    "cpu_offload": "offload_params fsdp_offload_params",
    "device": "accelerator",
    "drop_last": "dataloader_drop_last",
    "epochs": "num_train_epochs max_epochs num_epochs",
    "eval_batches": "eval_iters limit_val_batches max_eval_batches",
    "eval_data": "eval_dataset validation_file validation_data val_data",
    "eval_every": "eval_steps eval_interval val_check_interval eval_strategy evaluation_strategy eval_freq",
    "front": "fsdp_version",
    "global_batch": "global_batch_size total_batch_size",
    "heads": "n_head n_heads num_heads num_attention_heads",
    "keep_best": "save_top_k load_best_model_at_end",
    "keep_last": "save_total_limit keep_last_n",
    "layers": "n_layer n_layers num_layers num_hidden_layers",
    "log_every": "logging_steps log_interval log_every_n_steps log_freq",
    "lora": "use_lora lora_r lora_rank lora_alpha lora_dropout lora_targets lora_target_modules target_modules "
    "lora_modules_to_save peft_config use_peft",
    "lr": "learning_rate max_lr peak_lr",
    "min_lr": "min_learning_rate eta_min",
    "minutes": "max_time max_minutes",
    "model": "model_name_or_path pretrained_model_name_or_path model_name base_model",
    "optimizer": "optim optimizer_type",
    "output": "output_dir out_dir default_root_dir save_dir checkpoint_dir",
    "param_dtype": "torch_dtype dtype",
    "quantize": "load_in_4bit",
    "ranks": "nproc_per_node num_processes devices num_gpus gpus n_gpu",
    "resume": "resume_from_checkpoint ckpt_path resume_from init_from checkpoint load_checkpoint",
    "save_every": "save_steps save_interval checkpoint_interval save_freq save_strategy",
    "scheduler": "lr_scheduler_type lr_scheduler",
    "seed": "random_seed",
    "sequence_length": "max_seq_length max_seq_len seq_len seq_length max_length block_size",
    "steps": "max_steps max_iters num_steps train_steps total_steps training_steps iterations",
    "strategy": "sharding_strategy fsdp fsdp_sharding_strategy",
    "train_data": "dataset dataset_name train_file data_path train_dataset data",
    "units": "auto_wrap_policy fsdp_auto_wrap_policy fsdp_transformer_layer_cls_to_wrap",
    "warmup": "warmup_ratio",
    "warmup_steps": "warmup_iters num_warmup_steps",
    "weight_decay": "wd",
    "width": "n_embd hidden_size d_model",
    "workers": "dataloader_num_workers num_workers",
}

USUAL_NAMES = {name: setting for setting, names in _BY_SETTING.items() for name in names.split()}
"""By such a name: ours."""
