"""LightningModules in dstrat's Trainer, and dstrat's strategies in Lightning's.

Importing it brings in neither torch nor Lightning.  Lightning's own Trainer takes ``strategy="dstrat_ddp"`` and the
others as soon as Lightning is imported, before or after.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dstrat.plugins.exports import lazy_exports
from dstrat_lightning.registration import register_when_imported

if TYPE_CHECKING:
    from dstrat_lightning.checkpoint import LightningCheckpointIO, convert_to_lightning, load_from_checkpoint
    from dstrat_lightning.module import adapt_module

__all__ = ["LightningCheckpointIO", "adapt_module", "convert_to_lightning", "load_from_checkpoint"]

_HOMES = {
    "LightningCheckpointIO": "dstrat_lightning.checkpoint",
    "adapt_module": "dstrat_lightning.module",
    "convert_to_lightning": "dstrat_lightning.checkpoint",
    "load_from_checkpoint": "dstrat_lightning.checkpoint",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(__name__, _HOMES)


register_when_imported()
