"""Large graphs, and graphs of several types of nodes."""
