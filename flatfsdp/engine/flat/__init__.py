"""One flat parameter: its shard, where its unsharded form comes from, what its parameters show, and its gradient; it
knows no unit. Imports `comm`, `layout` and what these import.
"""
