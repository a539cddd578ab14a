"""Partitions of a graph: contract and registry of partitioners, one partitioner a file."""
