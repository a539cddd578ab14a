"""Partitions of the nodes, and the batches cut from them."""
