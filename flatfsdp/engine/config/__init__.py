"""What users ask for, checked once and kept as frozen values: arguments, options of units, strategies, precision.

Imports `schedule`, and flatfsdp's errors, `api` and `comm_hooks`.
"""
