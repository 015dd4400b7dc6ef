"""The thread that reports why a rank waits or has ended, and the store through which it talks to other ranks.

Imports `base`, and flatfsdp's errors.
"""
