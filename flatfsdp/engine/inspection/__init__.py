"""Figures of a model without training it: summary, statistics, memory plan, dry run, advice on ways to shard it.

Imports the wrapper, and every other package of the engine.
"""
