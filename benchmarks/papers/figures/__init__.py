"""The papers' figures, a module a paper, and what they share."""
