"""Profilers that the Trainer starts."""
