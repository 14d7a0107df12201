"""From the loaders of a module or data module to the batches on this process's device."""
