"""Exchanges of CPU tensors among the ranks of one host, through memory that they share: no byte passes the kernel.

Imports `base`, `device` and `comm_stats` beside it. What users hold is never shared: every byte is copied into an
outbox and out of it. [Note: outbox]
"""
