"""Logged values of one stage; tensors stay on their device until they are read."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from numbers import Real
from typing import TYPE_CHECKING, Any

from torch import Tensor

from dstrat.errors import MisuseError
from dstrat.training.metrics.reduction import Options, changed
from dstrat.training.metrics.values import DATALOADER_SUFFIX, MetricEntry, NumberEntry, is_metric

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn

    from dstrat.training.metrics.values import LoggedValue
    from dstrat.training.module.train_module import TrainModule


_OF_LOGGERS = {"step", "epoch"}
"""What a row of the loggers has beside the values."""

_ADD_DATALOADER_IDX = Options._fields.index("add_dataloader_idx")


class LoggedValues:
    """All names that one stage of a run logs (train, validate, test), in the order of their first values.

    Args:
        training: Whether it is the training, where values count per step by default.

    Attributes:
        in_step: Whether a step of the module runs, which decides the defaults of ``on_step`` and ``on_epoch``.
        has_batches: Whether this process had a batch in this epoch.
        lacks_a_loader: Whether it had none of one of several loaders.
        writes_steps: Whether loggers write the value of a step of any name.
        computed_metrics: Metric objects whose value over the epoch is known, and which still hold the epoch.
    """

    def __init__(self, *, training: bool) -> None:
        self._training = training
        self._entries: dict[str, NumberEntry | MetricEntry] = {}
        self._owners: dict[str, str] = {}  # of the names of values: the names that they were logged by
        self._resumed: dict[str, NumberEntry | MetricEntry] = {}  # of a checkpoint, and not logged again yet
        self._is_open = False
        self._suffix = ""
        self._batch: Any = None
        self._batch_size: int | None = None
        self.in_step = False
        self.has_batches = self.lacks_a_loader = self.writes_steps = False
        self.computed_metrics: list[MetricEntry] = []
        self._loaders_of: dict[str, set[str]] = {}  # of names that are logged without the index of a loader

    # What the loops tell

    def start_epoch(self) -> None:
        """Let the module log, until the end of the epoch; nothing where it may already."""
        if not self._is_open:
            self._is_open, self.has_batches, self.lacks_a_loader = True, False, False
            self._loaders_of = {}
            self.forget()

    def end_epoch(self) -> None:
        """Refuse what is logged, until the next epoch."""
        self._is_open = False

    def reset_metrics(self) -> None:
        """Let metric objects forget the epoch, when the hooks at its end have seen them."""
        for entry in self.computed_metrics:
            entry.reset()
        self.computed_metrics = []

    @property
    def batch(self) -> Any:
        """The batch of the step, whose size weighs means."""
        return self._batch

    @batch.setter
    def batch(self, batch: Any) -> None:
        self._batch, self._batch_size = batch, None
        if batch is not None:
            self.has_batches = True

    @property
    def dataloader_idx(self) -> int | None:
        """Index of the loader where there are several; names get a suffix then."""
        return int(self._suffix.rpartition("_")[2]) if self._suffix else None

    @dataloader_idx.setter
    def dataloader_idx(self, index: int | None) -> None:
        self._suffix = "" if index is None else f"{DATALOADER_SUFFIX}{index}"

    # What the module logs

    def log(self, name: str, value: Any, arguments: tuple[Any, ...], batch_size: Any, module: TrainModule) -> None:
        """Keep a value; see :meth:`TrainModule.log`.

        Args:
            name: Its name.
            value: A number, a tensor or a metric object.
            arguments: What :class:`Options` is made of.
            batch_size: Its weight; None takes the size of the batch.
            module: Logs it.
        """
        if self._suffix:
            if arguments[_ADD_DATALOADER_IDX]:
                name += self._suffix
            else:
                self._loaders_of.setdefault(name, set()).add(self._suffix)
        entry = self._entries.get(name)
        if entry is None or entry.options != arguments or entry.in_step is not self.in_step or not self._is_open:
            entry = self._admit(entry, name, value, arguments, module)
        if not entry.weighs:
            entry.take(value, 1.0)
        elif batch_size is None:
            entry.take(value, self._batch_size or self._weight(name))
        elif isinstance(batch_size, int | float):
            entry.take(value, batch_size)
        else:
            entry.take(value, _as_weight(name, batch_size))

    def _admit(
        self, existing: LoggedValue | None, name: str, value: Any, arguments: tuple[Any, ...], module: TrainModule
    ) -> NumberEntry | MetricEntry:
        """Return the entry of a name that is new; refuse one that is logged in another way than before."""
        if not self._is_open:
            raise MisuseError(
                f"log({name!r}) works from the start of training, validation or test (on_train_start ...) to the end "
                "of an epoch (on_train_epoch_end ...), and neither here nor in prediction"
            )
        if existing is not None:
            if existing.options != arguments:
                raise changed(name, existing.options, arguments)
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
            has_peers = module.trainer.world_size > 1
            self._entries[name] = NumberEntry(name, options, **where, has_peers=has_peers)
        entry = self._entries[name]
        try:
            self._check_names(entry, has_loggers=bool(module.trainer.loggers))
        except MisuseError:
            del self._entries[name]
            raise
        self.writes_steps = self.writes_steps or (entry.on_step and entry.is_written)
        if resumed := self._resumed.pop(name, None):
            entry.load_state_dict(resumed.state_dict())
        return entry

    def _check_names(self, entry: LoggedValue, *, has_loggers: bool) -> None:
        """Refuse a value that would take the place of another one."""
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
            return 1
        size = size_of(self._batch)
        if size is None:
            raise MisuseError(
                f"log({name!r}): no tensor in the batch (a {type(self._batch).__name__}) tells its size, by which the "
                "mean over the epoch is weighted: give it, as log(..., batch_size=n)"
            )
        self._batch_size = size
        return size

    # What is read

    @property
    def entries(self) -> Iterable[NumberEntry | MetricEntry]:
        """Every name that was logged in any epoch."""
        return (*self._entries.values(), *self._resumed.values())

    @property
    def loaders_of(self) -> dict[str, set[str]]:
        """The suffixes of the loaders whose steps logged a value over the epoch without suffix, by its name."""
        return {self._entries[name].epoch_name: suffixes for name, suffixes in self._loaders_of.items()}

    def forget(self) -> None:
        """Forget the totals of the epoch."""
        for entry in self.entries:
            entry.start_epoch()

    # Going on in the middle of an epoch

    def state_dict(self) -> dict[str, Any]:
        """Return what the epoch has brought so far, as plain values and tensors."""
        names = {e.name: {**e.state_dict(), "options": e.resolved._asdict()} for e in self.entries if e.was_logged}
        return {"has_batches": self.has_batches, "names": names}

    def load_state_dict(self, state: Mapping[str, Any], module: nn.Module) -> None:
        """Go on from there, when the epoch has begun.

        Args:
            state: What :meth:`state_dict` returned.
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
    """Return an entry for a name of which only the resolved options are known, from another process or a checkpoint."""
    if options.metric_attribute is None:
        return NumberEntry(name, options, in_step=True, training=True)
    metric = module.get_submodule(options.metric_attribute)
    return MetricEntry(name, options, in_step=True, training=True, metric=metric, module=module)


def _as_weight(name: str, batch_size: Any) -> float:
    """Return a batch size that is no plain number: one of numpy, or a tensor with one element, which is read."""
    if isinstance(batch_size, Tensor) and batch_size.numel() == 1:
        return float(batch_size)
    if isinstance(batch_size, Real):
        return float(batch_size)
    raise MisuseError(f"log({name!r}, batch_size=...) got a {type(batch_size).__name__}; give a number")


def _describe_context(in_step: bool) -> str:
    return "in a step" if in_step else "around the steps"


# Size of a batch, the weight of its values in means over an epoch


# Tuples of types are tested faster than unions.
_NUMBERS = (int, float)
_SEQUENCES = (list, tuple)


def size_of(batch: Any) -> int | None:
    """Return the length of the first dimension of the first array or tensor in a batch; None where there is none.

    Goes into mappings, sequences and dataclasses in their order.  A number, as a tensor without dimensions, is one.
    """
    kind = type(batch)
    if kind is list or kind is tuple:  # what most batches are, and the quickest to tell
        items = batch
    else:
        shape = getattr(batch, "shape", None)
        if shape is not None:
            return int(shape[0]) if shape else 1
        if isinstance(batch, _NUMBERS):
            return 1
        items = _items(batch)
    for item in items:
        size = size_of(item)
        if size is not None:
            return size
    return None


def _items(batch: Any) -> Any:
    if isinstance(batch, _SEQUENCES):  # named tuples
        return batch
    if isinstance(batch, Mapping):
        return batch.values()
    if dataclasses.is_dataclass(batch):
        return (getattr(batch, field.name) for field in dataclasses.fields(batch))
    return ()
