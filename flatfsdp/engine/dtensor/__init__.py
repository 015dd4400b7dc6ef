"""Parameters that are DTensors: how a flat parameter stores them, and what shards are as DTensors between iterations;
the only package that imports torch.distributed.tensor, where a model has DTensors, since that takes seconds. Imports
`flat` and what it imports.
"""
