"""Strategies, which supply the batches of an epoch and the plans for their rows."""
