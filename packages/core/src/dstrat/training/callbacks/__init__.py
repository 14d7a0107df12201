"""Callbacks: checkpoints, progress, early stopping, averaging and more."""
