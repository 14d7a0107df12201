"""Search for the largest batch size that fits into memory."""

from __future__ import annotations

import gc
import logging
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from typing_extensions import override

from dstrat.errors import ConflictError, MisuseError, RequestError
from dstrat.training.callbacks.callback import Callback

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dstrat.training.loops.sources import DataSources, Source
    from dstrat.training.module.train_module import TrainModule
    from dstrat.training.trainer import Trainer

Mode = Literal["power", "binsearch"]
Stage = Literal["fit", "validate", "test", "predict"]

_SOURCES: dict[Stage, Source] = {"fit": "train", "validate": "val", "test": "test", "predict": "predict"}
# Texts of the CPU's allocator, cuBLAS and cuDNN, which raise plain RuntimeErrors.
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_NOT_SUPPORTED")

_log = logging.getLogger(__name__)


class BatchSizeFinder(Callback):
    """Search for the largest batch size that fits into memory, before a fit.

    A copy of the module runs a few steps with increasing batch sizes until memory is exhausted.  The fit then starts
    unchanged, with the size found.  The module or a data module must make the loaders, from a batch size that is its
    attribute or hyperparameter.  It works with one process only, which continues after memory was exhausted.

    Args:
        mode: ``"power"`` doubles the size until memory is exhausted; ``"binsearch"`` then searches below that size.
        steps_per_trial: Number of steps with each size.
        init_val: The first size.
        max_trials: Maximal number of sizes to try.
        batch_arg_name: The attribute of the module, the data module or the ``hparams`` of either.
        margin: Fraction by which ``"binsearch"`` reduces its result, from 0 to below 1.
        max_val: The largest size to try.

    Attributes:
        optimal_batch_size: The size found; ``init_val`` before a search.

    Raises:
        RequestError: An argument is out of range.
    """

    retired_members: ClassVar[Mapping[str, str]] = {
        "scale_batch_size": "it searches before a fit, and not in hooks of one: Tuner(trainer).scale_batch_size(module)"
    }

    def __init__(
        self,
        mode: Mode = "power",
        steps_per_trial: int = 3,
        init_val: int = 2,
        max_trials: int = 25,
        batch_arg_name: str = "batch_size",
        margin: float = 0.05,
        max_val: int = 8192,
    ) -> None:
        _check(mode, steps_per_trial, init_val, max_trials, margin, max_val)
        self._mode, self._margin = mode, margin
        self._steps_per_trial, self._init_val, self._max_trials = steps_per_trial, init_val, max_trials
        self._batch_arg_name, self._max_val = batch_arg_name, max_val
        self.optimal_batch_size: int | None = init_val

    @override
    def on_before_fit(self, trainer: Trainer, module: TrainModule, sources: DataSources) -> None:
        self.optimal_batch_size = find_batch_size(
            trainer,
            module,
            sources,
            stage="fit",
            mode=self._mode,
            steps_per_trial=self._steps_per_trial,
            init_val=self._init_val,
            max_trials=self._max_trials,
            batch_arg_name=self._batch_arg_name,
            margin=self._margin,
            max_val=self._max_val,
        )


def find_batch_size(
    trainer: Trainer,
    module: TrainModule,
    sources: DataSources,
    *,
    stage: Stage,
    mode: Mode,
    steps_per_trial: int,
    init_val: int,
    max_trials: int,
    batch_arg_name: str,
    margin: float,
    max_val: int,
) -> int | None:
    """Run a copy of a module with increasing batch sizes; set and return the largest one that fits into memory.

    The arguments are those of :class:`BatchSizeFinder`, and the following run.

    Returns:
        The size; None with ``fast_dev_run``.

    Raises:
        ConflictError: The run has several processes, or its loaders do not depend on the size.
        MisuseError: There is no attribute for the size, or not even one sample fits into memory.
        RequestError: An argument is out of range.
    """
    from dstrat.training.callbacks.trial import attribute_holders, restored_random_state, set_attribute

    _check(mode, steps_per_trial, init_val, max_trials, margin, max_val)
    if trainer.fast_dev_run:
        _log.warning("no batch size is searched with fast_dev_run")
        return None
    if trainer.plan.world_size > 1:
        # A rank without memory leaves its collectives, in which the others would wait for it.
        raise ConflictError(
            f"the search for a batch size exhausts the memory of one process, and this run has "
            f"{trainer.plan.world_size}: search on one device, and set {batch_arg_name} to the result"
        )
    if sources.passed(_SOURCES[stage]) is not None:
        raise ConflictError(
            "a loader was passed, whose batch size is fixed: let the module or a data module make it with its "
            f"{batch_arg_name}"
        )
    owners = (module, sources.datamodule)
    if not attribute_holders(batch_arg_name, *owners):
        raise MisuseError(
            f"neither {type(module).__name__} nor a data module nor their hparams have {batch_arg_name!r}: make the "
            "loaders with such an attribute, or pass the name of another one as batch_arg_name"
        )
    before = [(holder, getattr(holder, batch_arg_name)) for holder in attribute_holders(batch_arg_name, *owners)]
    trial = _BatchSizeTrial(trainer, module, sources, stage, steps_per_trial, batch_arg_name)
    try:
        with restored_random_state(None):
            if mode == "power":
                size = _largest_power(trial, init_val, max_trials, max_val)
            else:
                size = _largest(trial, init_val, max_trials, max_val)
                size = max(1, int(size * (1 - margin)))
    finally:
        for holder, value in before:  # trials set it on the data module, which is not copied
            setattr(holder, batch_arg_name, value)
    set_attribute(batch_arg_name, size, *owners)
    # Python shows warnings, but no infos, of a program that has not configured logging.
    _log.warning("%s is %d now", batch_arg_name, size)
    return size


class _BatchSizeTrial:
    """Trials of batch sizes with a copy of the module."""

    def __init__(
        self, trainer: Trainer, module: TrainModule, sources: DataSources, stage: Stage, steps: int, attribute: str
    ) -> None:
        self._trainer, self._module, self._sources = trainer, module, sources
        self._stage, self._steps, self._attribute = stage, steps, attribute
        self._size = _DatasetSize(_SOURCES[stage])

    def covers_data(self, batch_size: int) -> bool:
        """Return whether a batch has the entire dataset of the last trial."""
        return self._size.samples is not None and batch_size >= self._size.samples

    def fits(self, batch_size: int) -> bool:
        """Return whether steps with a batch size fit into memory."""
        from dstrat.training.callbacks.trial import TrialTrainer, copy_module, run_trial, set_attribute

        limits = dict.fromkeys(("limit_val_batches", "limit_test_batches", "limit_predict_batches"), self._steps)
        trial = TrialTrainer(self._trainer, self._size, max_steps=self._steps, max_epochs=None, **limits)
        module = copy_module(self._module, "the search for a batch size")
        set_attribute(self._attribute, batch_size, module, self._sources.datamodule)
        try:
            run_trial(trial, self._stage, module, self._sources)
        except (RuntimeError, MemoryError) as error:
            is_known = isinstance(error, MemoryError | torch.OutOfMemoryError)
            if not is_known and not any(text in str(error) for text in _OUT_OF_MEMORY):
                raise
            _log.info("%s=%d does not fit into memory", self._attribute, batch_size)
            return False
        finally:
            del trial, module  # otherwise their memory would count in the next trial
            gc.collect()  # a module and its Trainer refer to each other
            if torch.accelerator.is_available():
                torch.accelerator.empty_cache()
        _log.info("%s=%d fits into memory", self._attribute, batch_size)
        return True


class _DatasetSize(Callback):
    """The number of samples in the dataset of a run, if it is known."""

    def __init__(self, source: Source) -> None:
        self.source, self.samples = source, None

    samples: int | None

    @override
    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._read(trainer.train_dataloader)

    @override
    def on_validation_start(self, trainer: Trainer, module: TrainModule) -> None:
        if self.source == "val":  # the validation of a fit does not limit its batch size
            self._read(trainer.val_dataloaders)

    @override
    def on_test_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._read(trainer.test_dataloaders)

    @override
    def on_predict_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._read(trainer.predict_dataloaders)

    def _read(self, loaders: object) -> None:
        from dstrat.data.combined_loader import leaves

        try:
            self.samples = max(len(loader.dataset) for loader in leaves(loaders))
        except (AttributeError, TypeError, NotImplementedError):  # streams have no length
            self.samples = None


def _largest_power(trial: _BatchSizeTrial, size: int, max_trials: int, max_val: int) -> int:
    """Return the largest size that fits, by doubling, or by halving if the first size does not fit."""
    best = 0  # none yet
    has_failed = False
    for _ in range(max_trials):
        if trial.fits(size):
            best = size
            if has_failed or size == max_val or trial.covers_data(size):
                break
            size = min(2 * size, max_val)
        elif best or size == 1:
            break
        else:
            has_failed, size = True, size // 2
    return _checked(best, size)


def _largest(trial: _BatchSizeTrial, size: int, max_trials: int, max_val: int) -> int:
    """Return the largest size that fits, by doubling, then by bisection below the first one that does not fit."""
    low, high = 0, max_val + 1  # sizes that fit and that do not; high is unchanged until one does not fit
    for _ in range(max_trials):
        if trial.fits(size):
            low = size
            if trial.covers_data(size):
                break
        else:
            high = size
        if high - low <= 1:
            break
        size = min(2 * size, max_val) if high == max_val + 1 else (low + high) // 2
    return _checked(low, size)


def _checked(best: int, last: int) -> int:
    if not best:
        raise MisuseError(
            f"no batch size that was tried fits into memory, the last of them was {last}: begin with a smaller "
            "init_val, allow more trials, or take a smaller model"
        )
    return best


def _check(mode: str, steps_per_trial: int, init_val: int, max_trials: int, margin: float, max_val: int) -> None:
    if mode not in ("power", "binsearch"):
        raise RequestError(f"mode={mode!r} is not known: choose 'power' or 'binsearch'")
    counts = {"steps_per_trial": steps_per_trial, "init_val": init_val, "max_trials": max_trials, "max_val": max_val}
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise RequestError(f"{name}={value!r} must be an int of at least 1")
    if init_val > max_val:
        raise RequestError(f"init_val={init_val} is larger than max_val={max_val}")
    if not 0 <= margin < 1:
        raise RequestError(f"margin={margin!r} must be at least 0 and less than 1")
