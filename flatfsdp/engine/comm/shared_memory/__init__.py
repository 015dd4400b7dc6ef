"""Exchanges of CPU tensors among the ranks of one host through shared memory, without copies by the kernel.

Imports `base` and `device`, and modules of the package above. Users' tensors are never in shared memory: all data are
copied into an outbox and out of it. [Note: outbox]
"""
