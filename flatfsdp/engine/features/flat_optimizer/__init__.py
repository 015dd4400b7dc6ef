"""Element-wise optimizers that step on flat parameters as wholes."""
