"""Maps of names to ids that are kept in a dataset: their files, reading them, and numbering names in bounded memory."""
