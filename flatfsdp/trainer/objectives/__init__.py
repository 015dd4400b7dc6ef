"""What is minimised, and how it is computed without whole logits."""
