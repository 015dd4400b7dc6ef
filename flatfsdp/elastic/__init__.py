"""The state of each rank, redundant in the memory of others, so that a job outlives the loss of ranks."""
