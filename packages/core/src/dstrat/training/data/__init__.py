"""From the user's loaders to the batches on this process's device."""
