"""State of optimizers by the names of parameters: gathered, scattered, rekeyed."""
