"""Inspectors, which look at accesses ahead of time and plan batches."""
