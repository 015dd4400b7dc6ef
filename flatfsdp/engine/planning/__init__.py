"""Layouts whose pieces end between the grains of parameters: grains, and a search for little padding, in integers only.

Imports `layout`.
"""
