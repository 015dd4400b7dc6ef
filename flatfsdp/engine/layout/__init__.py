"""The positions of parameters in a flat parameter, and which elements of it each rank owns, in integers only.

Imports flatfsdp's errors.
"""
