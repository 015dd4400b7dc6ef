"""From a plain model to a sharded one: its units, its wrapper, what is computed again; models of transformers."""
