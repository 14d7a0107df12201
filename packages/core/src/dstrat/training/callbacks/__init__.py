"""What runs beside a training: checkpoints, progress, and whatever users add."""
