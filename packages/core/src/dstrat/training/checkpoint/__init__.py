"""Checkpoints of a Trainer: their paths, saved state, and its restoration."""
