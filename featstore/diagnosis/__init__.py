"""Diagnosis of this machine: what is in the way of reading fast, and what to change. ``featstore.doctor``, and its command."""
