"""One flat parameter: its shard, the sources of its unsharded form, the views that its parameters show, and its
gradient. It knows no unit. Imports `comm`, `config`, `layout` and what these import.
"""
