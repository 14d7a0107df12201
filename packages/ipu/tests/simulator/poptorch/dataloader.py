"""poptorch.DataLoader: batches with what one call of a model consumes.

After graphcore/poptorch, python/__init__.py (class DataLoader), without its processes.
"""

from __future__ import annotations

import torch

from .options import Options


class DataLoader(torch.utils.data.DataLoader):
    """A loader whose batches are deviceIterations * replicationFactor * gradientAccumulation times as large."""

    def __init__(self, options, dataset, batch_size=1, shuffle=None, num_workers=0, drop_last=True, **kwargs):
        assert isinstance(options, Options)
        options._freeze()
        self._options, self._combined = options, None
        if batch_size is not None:
            factor = options.device_iterations * options.replication_factor * options.Training.gradient_accumulation
            self._combined = batch_size * factor
            if not isinstance(dataset, torch.utils.data.IterableDataset):
                assert drop_last or len(dataset) % self._combined == 0, (
                    f"The number of elements in the dataset ({len(dataset)}) is not divisible by the number of "
                    f"elements processed per step ({self._combined}) and drop_last=False. Switch to drop_last=True."
                )
        super().__init__(dataset, self._combined, shuffle, num_workers=num_workers, drop_last=drop_last, **kwargs)

    @property
    def combinedBatchSize(self):
        """Number of samples that a call consumes."""
        return self._combined

    @property
    def options(self):
        """The options, frozen."""
        return self._options
