"""What tests are written with: process pools, models, references and the parity driver. Each file says its own idea."""
