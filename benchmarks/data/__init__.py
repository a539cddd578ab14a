"""Data that are imported, written, or handed to PyG."""
