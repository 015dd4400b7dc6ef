"""Parameters that are DTensors: how a flat parameter stores them, and what shards are as DTensors between iterations.

The only package that imports torch.distributed.tensor, and only where a model has DTensors: that takes seconds, which
`import flatfsdp` must not. Imports `flat` and what it imports.
"""
