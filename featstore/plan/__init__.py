"""Inspectors: what looks at accesses ahead and plans batches."""
