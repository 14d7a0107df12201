"""The Trainer: module, data, loops, callbacks and loggers."""
