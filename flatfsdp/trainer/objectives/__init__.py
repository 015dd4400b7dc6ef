"""Objectives, and their computation in chunks, without all logits in memory."""
