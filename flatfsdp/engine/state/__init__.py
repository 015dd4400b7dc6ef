"""From shards to full values by name and back: `summon_full_params()`, state dicts of models and of optimizers.

Imports `runtime` and what it imports.
"""
