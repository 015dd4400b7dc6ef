"""One device: streams and work in flight, resizable memory, and the tracking of bytes.

Imports `base`, and flatfsdp's errors.
"""
