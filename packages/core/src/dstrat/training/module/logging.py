"""Logging methods of a module."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dstrat.errors import MisuseError
from dstrat.parallel.shards import full_value
from dstrat.training.module.trainer_access import TrainerAccess

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping


_NO_OPTIONS = ("self", "name", "value")  # arguments of log that are not options


@dataclass(frozen=True, kw_only=True, slots=True)
class LogCall:
    """A call of :meth:`LoggingMethods.log`.

    Attributes:
        name: Of the value.
        value: The value.
        options: All other arguments by their names.
    """

    name: str
    value: Any
    options: dict[str, Any]


class LoggingMethods(TrainerAccess):
    """``log`` and ``log_dict`` of a :class:`~dstrat.training.module.train_module.TrainModule`."""

    _captured_logs: list[LogCall] | None = None

    @contextmanager
    def capture_logs(self) -> Iterator[list[LogCall]]:
        """Capture the calls of ``log`` of this module and its submodules in a ``with`` block, instead of logging.

        For a strategy that traces a step once: it makes the values outputs of the graph, and logs those of each call
        with :meth:`log` and the same options.
        """
        calls: list[LogCall] = []
        modules: Iterable[object] = self.modules()  # type: ignore[attr-defined]  # of torch.nn.Module, beside this class
        logging_modules = [module for module in modules if isinstance(module, LoggingMethods)]
        previous = self._captured_logs
        for module in logging_modules:
            module._captured_logs = calls  # noqa: SLF001 - of the same class
        try:
            yield calls
        finally:
            for module in logging_modules:
                module._captured_logs = previous  # noqa: SLF001 - likewise

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool = True,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: str | Callable[..., Any] = "mean",
        enable_graph: bool = False,
        sync_dist: bool | None = None,
        sync_dist_group: Any | None = None,
        add_dataloader_idx: bool = True,
        batch_size: float | None = None,
        metric_attribute: str | None = None,
        rank_zero_only: bool = False,
    ) -> None:
        """Log a value for the progress bar, the loggers and callbacks; does nothing outside of a run.

        It works from the start of training, validation or test (``on_train_start`` ...) to the hook at the end of an
        epoch.  A tensor stays on its device until it is displayed or written.  The options of a name must not change.

        Args:
            name: The name, other than ``step`` and ``epoch``, which loggers write with every value.  With both
                ``on_step`` and ``on_epoch`` loggers write ``<name>_step`` and ``<name>_epoch``, and callbacks also read
                the epoch value by the plain name.
            value: A number, a tensor with one element, or a ``torchmetrics.Metric`` that is an attribute of this
                module.  A metric's result for the batch is its step value.  It reduces its epoch value itself, also
                over ranks, and is reset after the hooks at the end of the epoch, so that training and validation need
                separate metrics.  Of a DTensor, such as a norm of a sharded parameter, it is the full value, for which
                all ranks of its mesh must call ``log``.
            prog_bar: Whether the progress bar shows the value.
            logger: Whether the loggers write the value.
            on_step: Whether to log step values; by default in training steps only.  Loggers write them every
                ``log_every_n_steps``; in evaluation for each batch of rank 0, with the number of evaluated batches as
                the step.
            on_epoch: Whether to log the epoch value; by default everywhere except in training steps.
            reduce_fx: Reduction to the epoch value: mean (weighted by batch size), sum, max or min, by name or as
                torch's or Python's function.  For any other use a metric of torchmetrics.
            enable_graph: Must be False: logged values have no gradients.
            sync_dist: Whether to reduce values over all ranks; by default epoch values only.  With True step values are
                reduced whenever they are written (every ``log_every_n_steps``) and at the end of the epoch, and
                callbacks read the last reduced one.
            sync_dist_group: The process group to reduce over; by default all ranks.
            add_dataloader_idx: Whether names get the suffix ``/dataloader_idx_<n>`` if there are several loaders;
                without it there is one value over all of them.
            batch_size: Weight of the value in the mean, a number or a tensor with one element; by default the weight
                that ``training_step`` returns with its loss, or else the size of the batch's first tensor.
            metric_attribute: Name of the attribute with the metric; by default it is searched for.
            rank_zero_only: Whether only rank 0 logs the value, which is then not reduced.

        Raises:
            MisuseError: The value, the name, an option or the context of the call is not possible.
        """
        if self._captured_logs is not None:
            options = {option: setting for option, setting in locals().items() if option not in _NO_OPTIONS}
            self._captured_logs.append(LogCall(name=name, value=full_value(value), options=options))
            return
        trainer = self._trainer
        if trainer is None or trainer.barebones:
            return
        run = trainer.run  # its attributes are faster than the properties of the Trainer
        if not run.is_running:
            return
        if hasattr(value, "placements"):  # a DTensor; without a call, as log is called in every step
            value = full_value(value)  # by all ranks, also for a value of rank 0 only
        if rank_zero_only and trainer.global_rank != 0:
            return
        if not isinstance(name, str):
            raise MisuseError(f"log({name!r}, ...): the name is of the type {type(name).__name__}: give a str")
        run.logged.log(
            name,
            value,
            (  # a plain tuple in the order of Options, which compares equal to it: log is called in every step
                prog_bar,
                logger,
                on_step,
                on_epoch,
                reduce_fx,
                enable_graph,
                sync_dist,
                sync_dist_group,
                add_dataloader_idx,
                metric_attribute,
                rank_zero_only,
            ),
            batch_size,
            run.module,  # which this one may be a submodule of
        )

    def log_dict(
        self,
        dictionary: Mapping[str, Any],
        prog_bar: bool = False,
        logger: bool = True,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: str | Callable[..., Any] = "mean",
        enable_graph: bool = False,
        sync_dist: bool | None = None,
        sync_dist_group: Any | None = None,
        add_dataloader_idx: bool = True,
        batch_size: float | None = None,
        rank_zero_only: bool = False,
    ) -> None:
        """Log the values of a dict or a ``torchmetrics.MetricCollection``, with options as in :meth:`log`."""
        options: dict[str, Any] = {
            "prog_bar": prog_bar,
            "logger": logger,
            "on_step": on_step,
            "on_epoch": on_epoch,
            "reduce_fx": reduce_fx,
            "enable_graph": enable_graph,
            "sync_dist": sync_dist,
            "sync_dist_group": sync_dist_group,
            "add_dataloader_idx": add_dataloader_idx,
            "batch_size": batch_size,
            "rank_zero_only": rank_zero_only,
        }
        for name, value in _items(dictionary):
            self.log(name, value, **options)


def _items(dictionary: Any) -> Iterable[tuple[str, Any]]:
    torchmetrics = sys.modules.get("torchmetrics")  # imported already where a collection of it exists
    if torchmetrics is not None and isinstance(dictionary, torchmetrics.MetricCollection):
        # With the collection's prefix, and without a copy of state that its metrics share.
        items: Iterable[tuple[str, Any]] = dictionary.items(keep_base=False, copy_state=False)
        return items
    if not hasattr(dictionary, "items"):
        raise MisuseError(f"log_dict got a {type(dictionary).__name__}: give a dict of values, or use log(name, value)")
    return dictionary.items()  # type: ignore[no-any-return]  # of whatever mapping the user gave
