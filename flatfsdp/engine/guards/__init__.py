"""Refusals of what would go wrong without a sign, attached to models from outside: when a model is set up, around steps
of optimizers, and in functions of torch. Imports `models` and what it imports.
"""
