"""Several processes and machines."""
