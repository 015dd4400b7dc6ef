"""Parameters that are DTensors: their storage in a flat parameter, and shards as DTensors between iterations.
The only package that imports torch.distributed.tensor, if a model has DTensors, since that takes seconds. Imports
`transforms`, `parts`, `planning`, `transports` and what these import.
"""
