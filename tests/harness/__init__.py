"""Tools for tests: process pools, models, references and the parity driver. Each file describes its idea."""
