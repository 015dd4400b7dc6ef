"""From a plain model to a sharded one: its units, its wrapper, activation checkpointing; models of transformers."""
