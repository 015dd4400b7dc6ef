"""Small complete programs, each to be read in a minute and run as it stands.

`plain_loop`: a training loop under torchrun. `single_process`: one process without a launcher. `lora`: a frozen base
with trainable low-rank additions. `from_fsdp1`: a program written for torch's FSDP1, before and after its migration.
`resume`: checkpoints, and a run that is resumed. `own_model`: a user-defined model and data for the trainer.
"""
