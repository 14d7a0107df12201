"""Logged values of a stage, whose tensors stay on their device until they are read."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from numbers import Real
from typing import TYPE_CHECKING, Any

from torch import Tensor

from dstrat.errors import MisuseError
from dstrat.parallel.loss_weights import checked_weight
from dstrat.training.metrics.metric_objects import MetricEntry, is_metric
from dstrat.training.metrics.reduction import Options, changed_options_error
from dstrat.training.metrics.values import DATALOADER_SUFFIX, NumberEntry

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn

    from dstrat.training.metrics.values import LoggedValue
    from dstrat.training.module.train_module import TrainModule


_OF_LOGGERS = {"step", "epoch"}
"""Columns of the loggers beside the values."""

_ADD_DATALOADER_IDX = Options._fields.index("add_dataloader_idx")  # log passes a plain tuple, which is faster to make


class LoggedValues:
    """All names that a stage of a run logs (train, validate, test), in the order of their first values.

    Args:
        training: Whether it is the training, whose default is ``on_step=True``.

    Attributes:
        in_step: Whether a step of the module is in progress, which determines the defaults of ``on_step`` and
            ``on_epoch``.
        has_batches: Whether this process has had a batch in the epoch.
        lacks_a_loader: Whether it has had no batch of one of several loaders.
        writes_steps: Whether loggers write step values of any name.
        computed_metrics: Metric objects that have computed the value of the epoch, and are not reset yet.
    """

    def __init__(self, *, training: bool) -> None:
        self._training = training
        self._entries: dict[str, NumberEntry | MetricEntry] = {}
        self._owners: dict[str, str] = {}  # names of values (loss_step) -> logged names (loss)
        self._resumed: dict[str, NumberEntry | MetricEntry] = {}  # from a checkpoint, and not logged again yet
        self._is_open = False
        self._suffix = ""
        self._batch: Any = None
        self._batch_size: float | None = None
        self._device_weight: Tensor | None = None  # of the batch, instead of its size
        self._expects_weights = False
        self._unweighted: list[tuple[LoggedValue, Tensor | float]] = []
        self.in_step = False
        self.has_batches = self.lacks_a_loader = self.writes_steps = False
        self.computed_metrics: list[MetricEntry] = []
        self._loaders_of: dict[str, set[str]] = {}  # loaders of names that are logged without a loader's index

    # Methods for the loops

    def start_epoch(self) -> None:
        """Accept logged values until the end of the epoch; does nothing within one."""
        if not self._is_open:
            self._is_open, self.has_batches, self.lacks_a_loader = True, False, False
            self._loaders_of = {}
            self.forget()

    def end_epoch(self) -> None:
        """Refuse logged values until the next epoch."""
        self._is_open = False

    def reset_metrics(self) -> None:
        """Reset metric objects, after the hooks at the end of the epoch."""
        for entry in self.computed_metrics:
            entry.reset()
        self.computed_metrics = []

    @property
    def batch(self) -> Any:
        """The batch of the step, whose size is the weight in means."""
        return self._batch

    @batch.setter
    def batch(self, batch: Any) -> None:
        if self._unweighted:  # of a batch that was not trained on, as a hook has ended the epoch
            self._weigh_values()
        self._batch, self._batch_size, self._device_weight = batch, None, None
        if batch is not None:
            self.has_batches = True

    @property
    def dataloader_idx(self) -> int | None:
        """Index of the loader among several, which becomes a suffix of names; None for a single loader."""
        return int(self._suffix.rpartition("_")[2]) if self._suffix else None

    @dataloader_idx.setter
    def dataloader_idx(self, index: int | None) -> None:
        self._suffix = "" if index is None else f"{DATALOADER_SUFFIX}{index}"

    def expect_weights(self, expected: bool) -> None:
        """Set whether ``training_step`` may return a weight, which values of its batch then have by default."""
        self._expects_weights, self._unweighted = expected, []

    def weigh_batch(self, weight: Any) -> None:
        """Take the weight that ``training_step`` has returned with its loss.

        Values logged in the step before have it too, those with a ``batch_size`` excepted.

        Args:
            weight: A number, or a tensor with one element; None if the step returns none, and no later one does.
        """
        checked = None if weight is None else checked_weight(weight)
        if checked is None:
            self._expects_weights = False
        elif isinstance(checked, Tensor):
            self._device_weight = checked
        else:
            self._batch_size = checked
        self._weigh_values()

    def _weigh_values(self) -> None:
        unweighted, self._unweighted = self._unweighted, []
        for entry, value in unweighted:
            size = self._batch_size if self._device_weight is None else self._device_weight
            entry.weigh(value, self._weight(entry.name) if size is None else size)

    # Logging

    def log(self, name: str, value: Any, arguments: tuple[Any, ...], batch_size: Any, module: TrainModule) -> None:
        """Log a value; see :meth:`TrainModule.log`.

        Args:
            name: The name.
            value: A number, a tensor or a metric object.
            arguments: The fields of :class:`Options`.
            batch_size: The weight; None is that of the batch's loss, or the size of the batch.
            module: The module that logs.
        """
        if self._suffix:
            if arguments[_ADD_DATALOADER_IDX]:
                name += self._suffix
            else:
                self._loaders_of.setdefault(name, set()).add(self._suffix)
        entry = self._entries.get(name)
        # The usual case, a known name with the same options, is one comparison: log is called in every step.
        if entry is None or entry.options != arguments or entry.in_step is not self.in_step or not self._is_open:
            entry = self._admit(entry, name, value, arguments, module)
        if not entry.weighs:
            entry.take(value, 1.0)
        elif batch_size is None:
            size = self._batch_size
            if size is None:
                if self._expects_weights and self.in_step and self._batch is not None:
                    entry.take(value, None)
                    self._unweighted.append((entry, entry.latest))
                    if self._device_weight is not None:
                        self._weigh_values()
                    return
                size = self._weight(name)
            entry.take(value, size)
        elif isinstance(batch_size, int | float):
            entry.take(value, batch_size)
        else:
            entry.take(value, None)
            entry.weigh(entry.latest, _as_weight(name, batch_size))

    def _admit(
        self, existing: LoggedValue | None, name: str, value: Any, arguments: tuple[Any, ...], module: TrainModule
    ) -> NumberEntry | MetricEntry:
        """Return the entry of a new name; raise if a known name is logged in another way than before."""
        if not self._is_open:
            raise MisuseError(
                f"log({name!r}) works from the start of training, validation or test (on_train_start ...) to the end "
                "of an epoch (on_train_epoch_end ...), and neither here nor in prediction"
            )
        if existing is not None:
            if existing.options != arguments:
                raise changed_options_error(name, existing.options, arguments)
            raise MisuseError(
                f"log({name!r}) was called {_describe_context(existing.in_step)} before, now "
                f"{_describe_context(self.in_step)}: use two names"
            )
        if isinstance(value, Tensor) and value.is_complex():
            raise MisuseError(f"log({name!r}) got a complex tensor; log its real part, its angle or its absolute value")
        options = Options(*arguments)
        where = {"in_step": self.in_step, "training": self._training}
        if is_metric(value):
            self._entries[name] = MetricEntry(name, options, **where, metric=value, module=module)
        else:
            has_peers, accelerator = module.trainer.world_size > 1, module.trainer.strategy.accelerator
            self._entries[name] = NumberEntry(name, options, **where, has_peers=has_peers, accelerator=accelerator)
        entry = self._entries[name]
        try:
            self._check_names(entry, has_loggers=bool(module.trainer.loggers))
        except MisuseError:  # the user's code may catch it, and log another name
            del self._entries[name]
            raise
        self.writes_steps = self.writes_steps or (entry.on_step and entry.is_written)
        if resumed := self._resumed.pop(name, None):
            entry.load_state_dict(resumed.state_dict())
        return entry

    def _check_names(self, entry: LoggedValue, *, has_loggers: bool) -> None:
        """Raise if a value would overwrite another one in the loggers."""
        if entry.is_written and has_loggers and _OF_LOGGERS & {entry.step_name, entry.epoch_name}:
            raise MisuseError(
                f"log({entry.name!r}): loggers write the {entry.name} with every value, and this one would take its "
                "place: choose another name, or pass logger=False"
            )
        if duplicates := entry.value_names & self._owners.keys():
            name = min(duplicates)
            raise MisuseError(
                f"log({entry.name!r}) and log({self._owners[name]!r}) both give a value of the name {name!r}, as those "
                "of on_step=True with on_epoch=True end with _step and _epoch: choose another name"
            )
        self._owners.update(dict.fromkeys(entry.value_names, entry.name))

    def _weight(self, name: str) -> int:
        if not self.in_step:
            return 1  # values of hooks count equally
        size = size_of(self._batch)
        if size is None:
            raise MisuseError(
                f"log({name!r}): the batch (a {type(self._batch).__name__}) has no tensor with its size, by which the "
                "mean over the epoch is weighted: pass it, log(..., batch_size=n)"
            )
        self._batch_size = size
        return size

    # Reading

    @property
    def entries(self) -> Iterable[NumberEntry | MetricEntry]:
        """The entries of all names logged in any epoch."""
        return (*self._entries.values(), *self._resumed.values())

    @property
    def logged_metrics(self) -> list[MetricEntry]:
        """The entries of metric objects that were logged in this epoch."""
        return [entry for entry in self.entries if isinstance(entry, MetricEntry) and entry.was_logged]

    @property
    def loaders_of(self) -> dict[str, set[str]]:
        """The suffixes of the loaders that logged an epoch value without a suffix, by its name."""
        return {self._entries[name].epoch_name: suffixes for name, suffixes in self._loaders_of.items()}

    def forget(self) -> None:
        """Reset the totals of the epoch."""
        for entry in self.entries:
            entry.start_epoch()

    # State, for a resume within an epoch

    def state_dict(self) -> dict[str, Any]:
        """Return the values of the epoch until now, as plain values and tensors."""
        names = {e.name: {**e.state_dict(), "options": e.resolved._asdict()} for e in self.entries if e.was_logged}
        return {"has_batches": self.has_batches, "names": names}

    def load_state_dict(self, state: Mapping[str, Any], module: nn.Module) -> None:
        """Restore the values of an epoch, after its start.

        Args:
            state: The result of :meth:`state_dict`.
            module: Has the metric objects, on its device.
        """
        self.has_batches = state["has_batches"]
        self.forget()
        for name, saved in state["names"].items():
            if name not in self._entries:
                options = Options(**{**saved["options"], "sync_dist_group": None})
                self._resumed[name] = entry_of(name, options, module)
            (self._entries.get(name) or self._resumed[name]).load_state_dict(saved)


def entry_of(name: str, options: Options, module: nn.Module) -> NumberEntry | MetricEntry:
    """Return an entry from resolved options, which come from another rank or a checkpoint."""
    if options.metric_attribute is None:
        return NumberEntry(name, options, in_step=True, training=True)
    metric = module.get_submodule(options.metric_attribute)
    return MetricEntry(name, options, in_step=True, training=True, metric=metric, module=module)


def _as_weight(name: str, batch_size: Any) -> float | Tensor:
    """Return a batch size that is a number of numpy, or a tensor with one element, which stays on another device."""
    if isinstance(batch_size, Tensor) and batch_size.numel() == 1:
        return float(batch_size) if batch_size.is_cpu else batch_size.detach().reshape(())
    if isinstance(batch_size, Real):
        return float(batch_size)
    raise MisuseError(f"log({name!r}, batch_size=...) got a {type(batch_size).__name__}; give a number")


def _describe_context(in_step: bool) -> str:
    return "in a step" if in_step else "around the steps"


# Size of a batch: the weight of its values in means over an epoch


# Tuples of types are tested faster than unions.
_NUMBERS = (int, float)
_SEQUENCES = (list, tuple)


def size_of(batch: Any) -> int | None:
    """Return the length of the first dimension of the first array or tensor in a batch; None if it has none.

    It searches mappings, sequences and dataclasses in their order.  A 0-dim tensor has the size 1, and so has a batch
    of numbers without a tensor.
    """
    size = _first_size(batch, of_number=None)
    return _first_size(batch, of_number=1) if size is None else size


def _first_size(batch: Any, *, of_number: int | None) -> int | None:
    kind = type(batch)
    if kind is list or kind is tuple:  # most batches; an identity test is faster than isinstance
        items = batch
    else:
        shape = getattr(batch, "shape", None)
        if shape is not None:
            if shape:
                return int(shape[0])
            return 1 if isinstance(batch, Tensor) else of_number  # a number of numpy
        if isinstance(batch, _NUMBERS):
            return of_number
        items = _items(batch)
    for item in items:
        size = _first_size(item, of_number=of_number)
        if size is not None:
            return size
    return None


def _items(batch: Any) -> Any:
    if isinstance(batch, _SEQUENCES):  # subclasses, such as named tuples
        return batch
    if isinstance(batch, Mapping):
        return batch.values()
    if dataclasses.is_dataclass(batch):
        return (getattr(batch, field.name) for field in dataclasses.fields(batch))
    return ()
