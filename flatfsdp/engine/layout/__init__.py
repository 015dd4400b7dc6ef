"""Which element of which parameter lies where in a flat parameter, and how intervals become boxes and contiguous runs,
in integers only. Imports flatfsdp's errors.
"""
