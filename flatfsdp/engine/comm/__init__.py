"""Process groups and the collectives over them, each of which returns its pending work.

Imports `base`, `config`, `device` and `watchdog`.
"""
