"""The thread that reports why a rank waits or has ended, and the store through which ranks exchange these reports.

Imports `base`, and flatfsdp's errors.
"""
