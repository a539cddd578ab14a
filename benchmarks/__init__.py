"""Benchmarks: a folder a topic, whose modules are scripts, and ``tools``, what they measure with."""
