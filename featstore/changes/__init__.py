"""Changes of a dataset in place: fields that come and go, rows that change, nodes that are appended; each is one commit."""
