"""The loader: threads that prepare batches ahead, and the batches that a training loop gets."""
