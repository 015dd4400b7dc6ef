"""Settings as frozen dataclasses: what they accept, and where they come from: Python, tables, files, command lines."""
