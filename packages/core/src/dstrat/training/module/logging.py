"""How a module logs values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dstrat.training.trainer import Trainer


class LoggingMethods:
    """``log`` and ``log_dict`` of a :class:`~dstrat.training.module.train_module.TrainModule`."""

    _trainer: Trainer | None

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool = True,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: str = "mean",
        sync_dist: bool | None = None,
        batch_size: int | None = None,
    ) -> None:
        """Keep a value for the progress bar, the loggers and callbacks; does nothing outside a run.

        A tensor stays on its device until something shows or writes it.

        Args:
            name: Its name; with both ``on_step`` and ``on_epoch`` loggers write ``<name>_step`` and ``<name>_epoch``,
                and callbacks know the value over the epoch by the plain name too.
            value: A number or a tensor with one element.
            prog_bar: Whether the progress bar shows it.
            logger: Whether the loggers write it.
            on_step: Whether the value of each step counts; by default only in training steps.
            on_epoch: Whether the value over the epoch counts; by default everywhere but in training steps.
            reduce_fx: How values become the one of an epoch: mean (weighted by batch size), sum, max or min.
            sync_dist: Whether it is reduced over all processes; by default the value over an epoch is, one of a
                step is not.
            batch_size: Weight of the value in the mean; by default the size of the batch's first tensor.
        """
        if self._trainer is not None:
            self._trainer.logged.log(
                name,
                value,
                prog_bar=prog_bar,
                logger=logger,
                on_step=on_step,
                on_epoch=on_epoch,
                reduce_fx=reduce_fx,
                sync_dist=sync_dist,
                batch_size=batch_size,
            )

    def log_dict(self, dictionary: Mapping[str, Any], **options: Any) -> None:
        """Log several values with the same options as in :meth:`log`."""
        for name, value in dictionary.items():
            self.log(name, value, **options)
