"""Interfaces to subclass: strategy, accelerator, precision, checkpoint io, cluster environment, launcher."""
