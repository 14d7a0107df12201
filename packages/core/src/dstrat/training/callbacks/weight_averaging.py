"""Averages of a module's weights during its training."""

from __future__ import annotations

import inspect
import logging
import zlib
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from dstrat.checkpoint.strategy_state import CURRENT_WEIGHTS, replaced_weights
from dstrat.data.limits import check_count
from dstrat.errors import ConflictError, MisuseError, RequestError
from dstrat.plugins.options import check_keywords
from dstrat.training.callbacks.averaged_weights import AveragedWeights, move_towards
from dstrat.training.callbacks.callback import Callback
from dstrat.training.checkpoint.save import replace_rank_buffers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    from dstrat.training.module.train_module import TrainModule
    from dstrat.training.trainer import Trainer

_log = logging.getLogger(__name__)


class WeightAveraging(Callback):
    """Average the weights during training, validate with the average, and leave it in the module at the end.

    By default all steps have the same weight.  Override :meth:`should_update` to choose the steps or epochs, and pass
    ``avg_fn`` or ``multi_avg_fn`` for another average::

        class OfLastEpochs(WeightAveraging):
            def should_update(self, step_idx=None, epoch_idx=None):
                return epoch_idx is not None and epoch_idx >= 15

    Before the first update validation uses the current weights.

    A checkpoint has the average as its ``state_dict``, which an evaluation loads, and the current weights, with which a
    resumed training continues, as ``current_model_state``; a training resumes from these also without this callback.

    It works with every strategy that has the weights or shards of them in each process (``Strategy.local_weights``).
    The average of a shard is a shard, and takes as much memory; for weights in 16 bits it is in float32.  These weights
    are averaged as forward passes use them, not an optimizer's master weights.

    Args:
        device: Device of the average; by default the module's.
        use_buffers: Whether buffers are averaged too; otherwise they are copied.  Integer buffers are always copied,
            except with ``avg_fn`` or ``multi_avg_fn``.
        **kwargs: ``avg_fn`` or ``multi_avg_fn``, as of :class:`torch.optim.swa_utils.AveragedModel`; they get shards
            of sharded weights, and so work element by element.

    Raises:
        RequestError: Both ``avg_fn`` and ``multi_avg_fn`` are passed.
        MisuseError: Another argument is passed.
    """

    averages_weights = True

    def __init__(self, device: torch.device | str | int | None = None, use_buffers: bool = True, **kwargs: Any) -> None:
        accepted = [*inspect.signature(type(self)).parameters.values()][:-1]  # without **kwargs
        parameters = inspect.signature(AveragedWeights).parameters
        accepted += [parameters[name] for name in ("avg_fn", "multi_avg_fn")]
        check_keywords(accepted, kwargs, type(self).__name__)
        functions = {name: kwargs.get(name) for name in ("avg_fn", "multi_avg_fn")}
        if functions["avg_fn"] and functions["multi_avg_fn"]:
            raise RequestError("avg_fn and multi_avg_fn are both passed, and each is an average: pass one of them")
        self._options: dict[str, Any] = {
            "device": None if device is None else torch.device(device),
            "use_buffers": use_buffers,
            **functions,
        }
        self._average: AveragedWeights | None = None
        self._begin()

    def _begin(self) -> None:
        self._updated_at_step, self._updated_at_epoch = 0, -1
        self._checksum_of_updates = 0  # of the steps after which it was updated
        self._num_saved_updates = 0

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:  # noqa: ARG002 - for subclasses
        """Return whether to update the average now; by default after every optimizer step.

        It has to return the same on all ranks, which average their own weights or shards without communication.  A
        difference is an error when the average is used: in a validation, a checkpoint or at the end.

        Args:
            step_idx: Index of the last optimizer step of a batch, from 0; None at the end of an epoch.  A batch may
                have several steps in manual optimization, so that some indices are left out.
            epoch_idx: Index of the ending epoch, from 0; None after a step.
        """
        return step_idx is not None

    def _has_average(self, trainer: Trainer) -> bool:
        """Return whether the fit has an average, which all ranks have; collective, except in a save of one rank.

        Raises:
            MisuseError: The ranks have updated it in different steps.
        """
        updates, strategy = 0 if self._average is None else self._average.num_updates, trainer.strategy
        if strategy.world_size > 1 and not trainer.run.is_saved_alone:
            checksum = self._checksum_of_updates
            counts = strategy.from_host(torch.tensor([updates, -updates, checksum, -checksum]))
            most, least, *checksums = strategy.reduce(counts, reduce_op="max").tolist()
            if most != -least or checksums[0] != -checksums[1]:
                times = f"between {-least} and {most} times on all" if most != -least else "after other steps on others"
                raise MisuseError(
                    f"{type(self).__name__}.should_update has returned True {updates} times on rank "
                    f"{strategy.global_rank} of {strategy.world_size}, and {times}: decide by what all ranks have in "
                    "common, such as step_idx and epoch_idx"
                )
        return updates > 0

    @property
    def _is_swapped(self) -> bool:
        return self._average is not None and self._average.is_swapped

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"updated_at_step": self._updated_at_step}

    @override
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._updated_at_step = state_dict["updated_at_step"]

    @override
    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        if stage == "fit":  # an evaluation keeps the average for a checkpoint after it
            self._average = None
            self._begin()

    @override
    def on_fit_start(self, trainer: Trainer, module: TrainModule) -> None:
        other_averages = [
            other for other in trainer.callbacks if isinstance(other, WeightAveraging) and other is not self
        ]
        if other_averages:
            raise ConflictError(
                f"{type(self).__name__} and {type(other_averages[0]).__name__} would both leave their average in the "
                "module: pass one of them"
            )
        if not self._updated_at_step:  # of a resume without this callback's state the first steps are no new ones
            self._updated_at_step = trainer.global_step
        self._create(trainer)

    def _create(self, trainer: Trainer) -> AveragedWeights:
        """Create an empty average, unless a checkpoint has restored one; collective."""
        if self._average is None:
            try:
                self._average = AveragedWeights(trainer.strategy, **self._options)
            except ConflictError as error:
                raise ConflictError(
                    f"{type(self).__name__} cannot average the weights: {error}. Leave it out, or choose another "
                    "strategy"
                ) from error
        return self._average

    @override
    def on_train_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._update_after_step(trainer)

    def _update_after_step(self, trainer: Trainer) -> None:
        step = trainer.global_step
        if step != self._updated_at_step and self.should_update(step_idx=step - 1):
            self._update(trainer)
            self._updated_at_step = step

    @override
    def on_train_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        self._update_after_epoch(trainer)

    def _update_after_epoch(self, trainer: Trainer) -> None:
        epoch = trainer.current_epoch
        if epoch != self._updated_at_epoch and self.should_update(epoch_idx=epoch):
            self._update(trainer)
            self._updated_at_epoch = epoch

    def _update(self, trainer: Trainer) -> None:
        assert self._average is not None  # noqa: S101 - on_fit_start has made it
        self._average.update(trainer.strategy)
        self._checksum_of_updates = zlib.crc32(b"%d" % trainer.global_step, self._checksum_of_updates)

    @override
    def on_validation_start(self, trainer: Trainer, module: TrainModule) -> None:
        if trainer.is_fitting and self._has_average(trainer):
            self._swap(trainer)

    @override
    def on_validation_end(self, trainer: Trainer, module: TrainModule) -> None:
        if trainer.is_fitting and self._is_swapped:
            self._swap(trainer)

    @override
    def on_exception(self, trainer: Trainer, module: TrainModule, exception: BaseException) -> None:
        if trainer.is_fitting and self._is_swapped:
            self._swap(trainer)

    @override
    def on_train_end(self, trainer: Trainer, module: TrainModule) -> None:
        if self._has_average(trainer):
            self._swap(trainer)
        elif trainer.is_global_zero:
            _log.warning("%s never took the weights into an average: they stay as trained", type(self).__name__)

    def _swap(self, trainer: Trainer) -> None:
        assert self._average is not None  # noqa: S101 - callers have checked it
        if not self._average.is_swapped:
            self._average.share_buffers(trainer.strategy)
        self._average.swap(trainer.strategy)

    @contextmanager
    def average_in_module(self, trainer: Trainer) -> Iterator[None]:
        """Let the module have the average in a context, for a callback that writes its weights; collective.

        Before the first update it keeps the current weights.
        """
        self._update_if_due(trainer)
        if not trainer.is_fitting or self._is_swapped or not self._has_average(trainer):
            yield
            return
        self._swap(trainer)
        try:
            yield
        finally:
            self._swap(trainer)

    @override
    def teardown(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        if self._average is not None:
            self._average.to_host()  # frees the device; it is still needed for a checkpoint after the fit

    @override
    def on_save_checkpoint(self, trainer: Trainer, module: TrainModule, checkpoint: dict[str, Any]) -> None:
        run = trainer.run
        if run.is_running and not run.is_fitting:  # an evaluation, from which no training resumes
            return
        if run.final_state is not None and run.final_state.weights_of is not None:  # the module has other weights since
            return
        self._catch_up(trainer, checkpoint)
        if not self._has_average(trainer):
            return
        assert self._average is not None  # noqa: S101 - there is one
        strategy, state = trainer.strategy, checkpoint["state_dict"]
        average, current = self._average.states(strategy)
        checkpoint["state_dict"] = replaced_weights(strategy, state, average)
        if "loops" in checkpoint:  # otherwise it has weights only, and cannot be resumed
            checkpoint[CURRENT_WEIGHTS] = replaced_weights(strategy, state, current)
            checkpoint["averaging_state"] = {"n_averaged": self._average.num_updates}
            if self._is_swapped:  # saved in a validation, in which the module has the average
                replace_rank_buffers(checkpoint, strategy, self._average.buffers_of_training())

    def _catch_up(self, trainer: Trainer, checkpoint: dict[str, Any]) -> None:
        """Update the average for a checkpoint that another callback saves before this callback's hook is called."""
        if "callbacks" in checkpoint and self._update_if_due(trainer):
            checkpoint["callbacks"][self.state_key] = self.state_dict()

    def _update_if_due(self, trainer: Trainer) -> bool:
        """Update the average in a training before this callback's hook does; return whether it was possible."""
        if self._average is None or self._is_swapped or not trainer.training:
            return False
        self._update_after_step(trainer)
        if trainer.fit_loop.epochs_done > trainer.current_epoch:  # within the hooks at the end of an epoch
            self._update_after_epoch(trainer)
        return True

    @override
    def on_load_checkpoint(self, trainer: Trainer, module: TrainModule, checkpoint: dict[str, Any]) -> None:
        self._num_saved_updates = int(checkpoint.get("averaging_state", {}).get("n_averaged", 0))

    @override
    def restore_average(self, trainer: Trainer, load: Callable[[Mapping[str, Any]], None]) -> None:
        if self._num_saved_updates:
            self._create(trainer).restore(trainer.strategy, load, self._num_saved_updates)


class EMAWeightAveraging(WeightAveraging):
    """Exponential moving average: ``average = decay * average + (1 - decay) * weights`` at each update.

    Args:
        device: Device of the average; by default the module's.
        use_buffers: Whether buffers are averaged too.
        decay: Weight of the old average, from 0 to 1.
        update_every_n_steps: Number of optimizer steps between updates, of which a batch has at most one.
        update_starting_at_step: Index of the first step with an update; None is the first step.
        update_starting_at_epoch: Index of the first epoch with an update at its end; None is no epoch.
        **kwargs: Arguments of :class:`torch.optim.swa_utils.AveragedModel`.

    Raises:
        RequestError: An argument is out of range.
    """

    def __init__(
        self,
        device: torch.device | str | int | None = None,
        use_buffers: bool = True,
        decay: float = 0.999,
        update_every_n_steps: int = 1,
        update_starting_at_step: int | None = None,
        update_starting_at_epoch: int | None = None,
        **kwargs: Any,
    ) -> None:
        if not 0.0 <= decay <= 1.0:
            raise RequestError(f"decay={decay!r} must be between 0 and 1")
        check_count(update_every_n_steps, "update_every_n_steps", 1)
        super().__init__(device, use_buffers, multi_avg_fn=ExponentialAverage(decay), **kwargs)
        self.update_every_n_steps = update_every_n_steps
        self.update_starting_at_step = update_starting_at_step
        self.update_starting_at_epoch = update_starting_at_epoch

    @override
    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        if step_idx is not None:
            # A batch may have several steps: the last one that is due may not be the last one of its batch.
            due = step_idx - step_idx % self.update_every_n_steps
            return due >= max(self._updated_at_step, self.update_starting_at_step or 0)
        first = self.update_starting_at_epoch
        return epoch_idx is not None and first is not None and epoch_idx >= first


class ExponentialAverage:
    """Update of an exponential moving average; a class, since a closure cannot be pickled.

    Args:
        decay: Weight of the old average.
    """

    def __init__(self, decay: float) -> None:
        self._decay = decay

    @torch.no_grad()
    def __call__(self, averages: list[Tensor], currents: list[Tensor], _: Tensor | int) -> None:
        move_towards(averages, currents, 1.0 - self._decay)
