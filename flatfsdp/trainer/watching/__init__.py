"""Callbacks that show a run in other tools: TensorBoard, Weights & Biases, a profiler's trace; and callbacks named by
settings. Libraries are imported only where a run uses them."""
