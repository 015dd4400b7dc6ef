"""Axes of ranks and the collectives over them, each of which returns its pending work.

Imports `base` and `device`.
"""
