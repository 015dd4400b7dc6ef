"""Checks that need an accelerator, in separate parts: `tools/gpu_check.py` runs them.

Each part is a process, `python -m tools.gpu PART`, which writes each finding at once. `parts.py` lists them,
`runner.py` runs them one after the other within a budget, `tables.py` writes their findings.
"""
