"""The agreement of ranks on configuration, order of operations and initial values: compared as integers, explained in
words, independent of flat parameters. Imports `cpu`, `watchdog` and the packages that these import.
"""
