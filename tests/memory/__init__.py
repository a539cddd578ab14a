"""Tests of what is promised of memory, whatever counts it."""
