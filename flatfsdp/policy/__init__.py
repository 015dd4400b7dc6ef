"""Pure decisions: what a strategy means, which dtype serves what, which unit comes next. No tensors, no
communication."""
