"""Rows of features: gathers, hot and cold."""
