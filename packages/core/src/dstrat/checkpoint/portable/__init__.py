"""Checkpoints that move between strategies and world sizes: a directory of safetensors, JSON and a manifest."""
