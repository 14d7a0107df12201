"""LightningModules as TrainModules."""

from __future__ import annotations

import dataclasses
import logging
import os
from functools import wraps
from typing import TYPE_CHECKING, Any, ClassVar

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from dstrat import TrainModule, seed_everything
from dstrat.checkpoint.portable.checkpoint_io import PortableCheckpointIO
from dstrat.resolve.plan import PlanRow
from dstrat.training.loops.optimization import OptimizerProxy
from dstrat_lightning.checkpoint import LightningCheckpointIO
from dstrat_lightning.conversion import convert, is_of_lightning
from dstrat_lightning.internals import ModuleAttributes
from dstrat_lightning.trainer_view import TrainerView

if TYPE_CHECKING:
    from collections.abc import Callable

    from dstrat import Trainer

_log = logging.getLogger(__name__)


def adapt_module(module: Any) -> TrainModule:
    """Return a LightningModule as a TrainModule: the same object, whose class derives from both.

    It stays one; a Lightning Trainer is not to run it afterwards.
    """
    for submodule in list(module.modules()):  # those within it log too
        if any(is_of_lightning(base, "core.module:LightningModule") for base in type(submodule).__mro__):
            convert(submodule, ModuleBridge)
    return module  # type: ignore[no-any-return]  # a TrainModule now


def reset_seed() -> None:
    """Seed each rank anew, as Lightning does where its ``seed_everything`` was called."""
    if seed := os.environ.get("PL_GLOBAL_SEED"):  # set by it, and inherited by processes that are started
        seed_everything(int(seed))


def without_idle_monitors(configure_optimizers: Callable[..., Any]) -> Callable[..., Any]:
    """Return a ``configure_optimizers`` that names no monitor for schedulers which take no value.

    Lightning ignores it there, and of a TrainModule it is an error.
    """

    @wraps(configure_optimizers)
    def configure(self: Any) -> Any:
        returned = configure_optimizers(self)
        for config in _scheduler_dicts(returned):
            scheduler = config.get("scheduler", config.get("lr_scheduler"))
            if isinstance(scheduler, dict):
                scheduler = scheduler.get("scheduler")
            if isinstance(scheduler, LRScheduler) and not isinstance(scheduler, ReduceLROnPlateau):
                config.pop("monitor", None)
        return returned

    return configure


def _scheduler_dicts(returned: Any) -> list[dict[str, Any]]:
    """Return the dicts with a scheduler, or an optimizer and a scheduler, in a result of ``configure_optimizers``."""
    if isinstance(returned, dict):
        return [returned, *_scheduler_dicts(returned.get("lr_scheduler"))]
    values = returned if isinstance(returned, list | tuple) else ()
    return [config for value in values for config in _scheduler_dicts(value)]


def _write_single_files(trainer: Trainer) -> None:
    """Let a run save Lightning's files, as programs of Lightning's read them, unless the user chose a format.

    Shards stay in a folder: one file needs the memory of one process for all of them.
    """
    strategy, plan = trainer.strategy, trainer.plan
    row = next(row for row in plan.choices if row.subject == "checkpoint io")
    if not row.reason.startswith("the default") or type(strategy.checkpoint_io) is not PortableCheckpointIO:
        return
    if strategy.replicates_state or strategy.saves_full_state:
        strategy.components = dataclasses.replace(strategy.components, checkpoint_io=LightningCheckpointIO())
        changed = PlanRow(subject=row.subject, value="lightning", reason="the default of a LightningModule")
        choices = tuple(changed if choice is row else choice for choice in plan.choices)
        trainer.plan = dataclasses.replace(plan, checkpoint_io="lightning", choices=choices)
    elif trainer.is_global_zero and trainer.is_fitting:
        _log.warning(
            "each checkpoint is a folder of shards, which torch.load and Lightning's load_from_checkpoint cannot read: "
            "for single files pass Trainer(plugins='lightning')"
        )


class ModuleBridge(ModuleAttributes, TrainModule):
    """TrainModule with the attributes and arguments of a LightningModule where these differ."""

    wrappers: ClassVar = {"configure_optimizers": without_idle_monitors}
    configure_sharded_model = None  # Lightning still defines the old hook, which would count as the user's

    def attach(self, trainer: Trainer | None) -> None:
        """Take the Trainer, and let Lightning's random numbers and its messages be as on such a rank."""
        adapt_module(self)  # LightningModules that configure_model has made within this one
        if trainer is not None and not trainer.is_running:
            from lightning_utilities.core.rank_zero import rank_zero_only  # comes with Lightning, which the user has

            rank_zero_only.rank = trainer.global_rank  # Lightning's loggers and messages are rank 0's
            if trainer.world_size > 1:
                reset_seed()
            _write_single_files(trainer)
        super().attach(trainer)

    @property
    def trainer(self) -> Any:
        """The Trainer, under the names of Lightning's."""
        return TrainerView(super().trainer)

    @trainer.setter
    def trainer(self, trainer: Any) -> None:
        self.attach(trainer)

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        """Return the optimizer or the list of them; without ``use_pl_optimizer`` torch's own."""
        optimizers = super().optimizers()
        if use_pl_optimizer:
            return optimizers
        return [_plain(one) for one in optimizers] if isinstance(optimizers, list) else _plain(optimizers)


def _plain(optimizer: Any) -> Any:
    return optimizer.optimizer if isinstance(optimizer, OptimizerProxy) else optimizer
