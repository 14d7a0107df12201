"""The good strategy that the broken ones are made of."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dstrat import GradientSyncStrategy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


class Averaging(GradientSyncStrategy):
    """Averages each gradient after the backward pass."""

    def synchronize_gradients(self, gradients: Sequence[Tensor]) -> None:
        for gradient in gradients:
            gradient.copy_(self.reduce(gradient))
