"""Lists of tensors as one collective: small ones staged together, several grouped by NCCL, pieces copied by few calls.

Models are given these transports in place of the plain ones of `comm`. Imports `comm` and what it imports.
"""
