"""User-defined configuration, validated once and kept as frozen values: arguments, unit options, strategies, precision.

Imports `schedule`, and flatfsdp's errors and `api`.
"""
