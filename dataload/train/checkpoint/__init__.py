"""Checkpoints of a run: their folders, the state in them, and whether all ranks see them."""
