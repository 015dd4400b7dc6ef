"""What only an accelerator shows, checked in parts of their own: `tools/gpu_check.py` runs them.

Each part is a process, `python -m tools.gpu PART`, which writes what it finds as it finds it. `parts.py` lists them,
`runner.py` runs them one after the other within a budget, `tables.py` writes what they found.
"""
