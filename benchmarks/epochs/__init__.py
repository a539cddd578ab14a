"""Epochs by strategy, packs and plans."""
