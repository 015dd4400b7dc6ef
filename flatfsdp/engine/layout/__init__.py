"""The positions of parameters in a flat parameter, and the conversion of intervals to boxes and contiguous runs, in
integers only. Imports flatfsdp's errors.
"""
