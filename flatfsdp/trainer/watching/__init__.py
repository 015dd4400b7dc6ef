"""Callbacks that show a run elsewhere: in TensorBoard, on Weights & Biases, as a profiler's trace; and those named by
settings. Libraries are imported where a run uses them."""
