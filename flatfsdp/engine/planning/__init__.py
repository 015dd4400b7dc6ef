"""Layouts whose pieces end between rows, or between the grains of parameters: grains, and a search for little padding,
in integers only.

Imports `layout`.
"""
