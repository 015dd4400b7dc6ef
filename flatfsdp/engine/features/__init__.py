"""Optional features: clipping, detection of non-finite values, uneven inputs, communication hooks, coalescing of small
units, persistent parameters, optimizers that step in the backward or on local tensors. Imports `state`, `few_bits` and
what these import; no package below imports a feature.
"""
