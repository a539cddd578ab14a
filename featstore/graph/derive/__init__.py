"""Features that are made of others, and how they are made: by one process or by ranks, in one commit."""
