"""The lists that a graph keeps in memory: which, in what order of use, saved to disk, shared by ranks."""
