"""Checkpoints of a Trainer: their paths, what is saved, and what a resume restores."""
