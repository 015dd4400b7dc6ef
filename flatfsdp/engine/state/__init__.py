"""From shards to full values by name and back: `summon_full_params()`, state dicts of models and of optimizers.

Imports `guards` and what it imports.
"""
