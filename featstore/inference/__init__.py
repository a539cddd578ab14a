"""Inference: the outputs of a model at every node, layer by layer, out of core."""
