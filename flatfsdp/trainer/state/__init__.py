"""What a run has to find again, and the folders in which it does."""
