"""Interfaces to subclass: strategy, accelerator, precision, checkpoint io, launcher."""
