"""Exchanges of numbers that are quantized block-wise to few bits, over the transports of any backend.

Imports `transports` and what it imports.
"""
