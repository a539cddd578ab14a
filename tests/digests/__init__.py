"""Tests of what batches hold, the same for every strategy and in every version."""
