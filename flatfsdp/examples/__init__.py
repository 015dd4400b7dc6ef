"""Small complete programs, each to be read in a minute and run as it stands.

`plain_loop`: a training loop under torchrun. `single_process`: one process without a launcher. `lora`: a frozen base
with trainable low-rank additions. `from_fsdp1`: a program written for torch's FSDP1, and how it was before.
`resume`: checkpoints, and a run that goes on. `own_model`: a model and data of one's own for the trainer.
"""
