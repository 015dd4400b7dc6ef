"""Lists of tensors as one collective: small ones staged together, several grouped by NCCL, pieces copied by few calls;
and the collectives that no unit issues in a step.

Models are given these transports in place of the plain ones of `comm`. Imports `comm` and what it imports.
"""
