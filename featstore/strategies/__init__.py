"""Strategies: how the batches of an epoch come about, and where their rows are found."""
