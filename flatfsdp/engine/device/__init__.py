"""One device: streams and work in flight, resizable memory, version counters, and the count of bytes.

Imports `base`, and flatfsdp's errors.
"""
