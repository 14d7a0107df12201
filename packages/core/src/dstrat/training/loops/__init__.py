"""Loops over epochs and batches, and the work of a batch."""
