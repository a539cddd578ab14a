"""Sampling, lists in memory and on the drive."""
