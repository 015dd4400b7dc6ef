"""The main job behind `python -m flatfsdp.train`: a byte-level language model trained under FSDP.

It is a program like any user's: of flatfsdp it imports public names only, so what it does, any training script can do.
"""
