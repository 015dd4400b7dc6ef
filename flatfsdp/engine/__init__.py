"""Everything behind flatfsdp's public names, in packages.

Imports between them point downwards: from `inspection` and `facade` over `runtime` to `base`, as the table in
tests/repository/test_layering.py has them.
"""
