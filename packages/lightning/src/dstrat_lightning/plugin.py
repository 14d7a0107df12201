"""Records of the conversions and components of this distribution."""

from __future__ import annotations

from dstrat.plugins.component import Adapter, Component, hookimpl


@hookimpl
def dstrat_components() -> list[Component | Adapter]:
    """Return the conversions of both import names of Lightning, and its checkpoint format."""
    return [
        Adapter(
            foreign=_both("core.module:LightningModule"),
            target="dstrat_lightning.module:adapt_module",
            summary="LightningModule as a TrainModule",
        ),
        Adapter(
            foreign=_both("core.datamodule:LightningDataModule"),
            target="dstrat_lightning.data:adapt_data",
            summary="LightningDataModule as a DataModule",
        ),
        Adapter(
            foreign=_both("callbacks.callback:Callback"),
            target="dstrat_lightning.callbacks:adapt_callback",
            summary="Lightning's and its users' callbacks",
        ),
        Adapter(
            foreign=(
                *_both("loggers.logger:Logger"),
                # Fabric's, from which Lightning's derive.
                *("lightning.fabric.loggers.logger:Logger", "lightning_fabric.loggers.logger:Logger"),
            ),
            target="dstrat_lightning.loggers:adapt_logger",
            summary="Lightning's, Fabric's and their users' loggers",
        ),
        Component(
            kind="checkpoint_io",
            alias="lightning",
            target="dstrat_lightning.checkpoint:LightningCheckpointIO",
            summary="one .ckpt file for each checkpoint, which Lightning loads too",
        ),
    ]


def _both(name: str) -> tuple[str, str]:
    """Return a class of Lightning under the names of its two distributions."""
    return f"lightning.pytorch.{name}", f"pytorch_lightning.{name}"
