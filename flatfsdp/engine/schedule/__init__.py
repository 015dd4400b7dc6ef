"""The order in which units gather, reduce and complete: pure Python over hashable names, without tensors.

Imports nothing of flatfsdp.
"""
