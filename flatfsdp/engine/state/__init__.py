"""From shards to full values by name and back: `summon_full_params()`, state dicts of models and of optimizers.

Imports `guards`, `parts` and what these import.
"""
