"""Packs (DiskGNN): offline samples, layouts of the rows that their batches need, and a pack in place of its dataset."""
