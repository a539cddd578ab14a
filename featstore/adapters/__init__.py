"""Adapters to other frameworks, a package each. A framework is imported by its own package alone, when that is asked for."""
