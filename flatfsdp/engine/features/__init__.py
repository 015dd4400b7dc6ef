"""Optional features: clipping, detection of non-finite values, inference, uneven inputs, communication hooks,
optimizers in the backward and over flat parameters. Imports `state`, `few_bits` and what these import; no package below
imports a feature.
"""
