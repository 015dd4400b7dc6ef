"""Optional features: clipping, detection of non-finite values, inference, uneven inputs, communication hooks,
optimizers in the backward and over flat parameters. Imports `state` and what it imports; no package below imports
a feature.
"""
