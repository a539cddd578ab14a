"""What is in the way of reading fast on this machine, and what to change: ``featstore.doctor``, and the command of its name."""
