"""The loops over epochs and batches, and what they do with a batch."""
