"""The state of a run and its checkpoints."""
