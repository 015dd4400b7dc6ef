"""The default task of `python -m flatfsdp.train`: a transformer over the bytes of some text."""
