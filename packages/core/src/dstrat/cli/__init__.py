"""The command ``dstrat``, and command lines of training programs, which need the extra ``dstrat[cli]``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dstrat.plugins.exports import lazy_exports

if TYPE_CHECKING:
    from dstrat.cli.training.dstrat_cli import ArgsType as ArgsType
    from dstrat.cli.training.dstrat_cli import DstratCLI as DstratCLI
    from dstrat.cli.training.dstrat_cli import instantiate_class as instantiate_class
    from dstrat.cli.training.parser import DstratArgumentParser as DstratArgumentParser
    from dstrat.cli.training.parser import LRSchedulerCallable as LRSchedulerCallable
    from dstrat.cli.training.parser import LRSchedulerTypeUnion as LRSchedulerTypeUnion
    from dstrat.cli.training.parser import OptimizerCallable as OptimizerCallable
    from dstrat.cli.training.parser import ReduceLROnPlateau as ReduceLROnPlateau
    from dstrat.cli.training.save_config_callback import SaveConfigCallback as SaveConfigCallback

_HOMES = {
    "ArgsType": "dstrat.cli.training.dstrat_cli",
    "DstratArgumentParser": "dstrat.cli.training.parser",
    "DstratCLI": "dstrat.cli.training.dstrat_cli",
    "LRSchedulerCallable": "dstrat.cli.training.parser",
    "LRSchedulerTypeUnion": "dstrat.cli.training.parser",
    "OptimizerCallable": "dstrat.cli.training.parser",
    "ReduceLROnPlateau": "dstrat.cli.training.parser",
    "SaveConfigCallback": "dstrat.cli.training.save_config_callback",
    "instantiate_class": "dstrat.cli.training.dstrat_cli",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(__name__, _HOMES)
