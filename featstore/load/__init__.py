"""The loader, whose threads prepare batches ahead, and the mini-batches that it delivers."""
