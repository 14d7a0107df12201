"""The precisions that run on all hardware."""
