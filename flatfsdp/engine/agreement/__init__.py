"""What ranks must have in common (configuration, order of operations, values), compared as integers and explained in
words; it knows no flat parameter. Imports `comm`, `watchdog` and what these import.
"""
