"""Units, their model, and the drivers that issue gathers and reductions from hooks of modules and of autograd.

Imports `flat`, `schedule` and what these import.
"""
