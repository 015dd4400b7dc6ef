"""Exchanges of CPU tensors, through memory that the ranks of one host share or over gloo; and huge pages for memory.

Imports `transports` and what it imports. Users' tensors are never in shared memory: all data are copied into an outbox
and out of it. [Note: outbox]
"""
