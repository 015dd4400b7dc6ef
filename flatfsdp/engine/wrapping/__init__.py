"""From a module and arguments to units, and back: construction, materialization, auto-wrapping, copies and pickles.

Imports `cpu`, `few_bits`, `dtensor`, `features` and what these import, `planning`, and `flatfsdp.wrap`.
"""
