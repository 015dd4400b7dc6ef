"""Units, the model that they form, and what turns hooks of modules and of autograd into gathers and reductions.

Imports `flat`, `agreement`, `schedule` and what these import.
"""
