"""Writing how fast training goes to the loggers."""

from __future__ import annotations

import logging
import math
from time import monotonic
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.flop_counter import FlopCounterMode
from typing_extensions import override

from dstrat.errors import RequestError
from dstrat.training.callbacks.callback import Callback
from dstrat.training.callbacks.peak_flops import peak_flops
from dstrat.training.callbacks.throughput import Throughput
from dstrat.training.loggers.several import call_loggers
from dstrat.training.metrics.batch_size import size_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from dstrat.training.callbacks.throughput import Rates
    from dstrat.training.module.train_module import TrainModule
    from dstrat.training.trainer import Trainer

_log = logging.getLogger(__name__)


class ThroughputMonitor(Callback):
    """Writes batches, samples and tokens per second of training, and the model FLOPs utilization, to the loggers.

    Values are ``throughput/samples_per_sec`` and so on of the whole job, ``throughput/device/samples_per_sec`` of one
    device (the mean over the processes), ``throughput/device/flops_per_sec`` and ``throughput/device/mfu``.  They are
    written with the other values of steps (``log_every_n_steps``), leave validation out, and start after the first
    batch.  The cost is about a microsecond per batch, and one small reduction for each write.

    The operations of the first batch, forward and backward, are counted by ``torch.utils.flop_counter``, where the
    peak is known; other batches count by their number of samples.  Kernels of one's own are not seen by it, and what is
    computed again for activation checkpointing counts twice: pass ``flops_per_sample`` then.

    Args:
        batch_size_fn: Returns the number of samples of a batch; by default the length of its first tensor.
        length_fn: Returns the number of tokens of a batch, or of whatever a sample is made of; None counts none.
        window_size: Number of batches to measure over.
        available_flops: Peak operations per second of one device; by default that of common NVIDIA GPUs in the
            dtype of the run's precision (:func:`~dstrat.training.callbacks.peak_flops.peak_flops`).
        flops_per_sample: Operations of training on one sample; None counts them.

    Raises:
        RequestError: A number is out of range.
    """

    def __init__(
        self,
        batch_size_fn: Callable[[Any], int] | None = None,
        length_fn: Callable[[Any], int] | None = None,
        window_size: int = 100,
        available_flops: float | None = None,
        flops_per_sample: float | None = None,
    ) -> None:
        for name, value in (
            ("window_size", window_size),
            ("available_flops", available_flops),
            ("flops_per_sample", flops_per_sample),
        ):
            if value is not None and value <= 0:
                raise RequestError(f"ThroughputMonitor({name}={value!r}) must be more than 0")
        self._batch_size_fn, self._length_fn = batch_size_fn or size_of, length_fn
        self._window_size = window_size
        self._available_flops, self._known_flops_per_sample = available_flops, flops_per_sample
        self._throughput: Throughput | None = None
        self._peak: float | None = None
        self._flops_per_sample: float | None = None
        self._counter: FlopCounterMode | None = None
        self._must_count = False
        self._paused_at = 0.0
        self._due_at_step: float = math.inf

    @override
    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        if not (trainer.loggers and trainer.log_every_n_steps):
            if trainer.is_global_zero:
                _log.warning("ThroughputMonitor writes nothing, as the Trainer has no logger that writes in steps")
            return
        self._throughput = Throughput(self._window_size)
        self._peak = self._available_flops or _peak_of(trainer)
        self._flops_per_sample = self._known_flops_per_sample
        self._must_count = self._peak is not None and self._flops_per_sample is None
        self._set_due(trainer)

    @override
    def on_train_batch_start(self, trainer: Trainer, module: TrainModule, batch: Any, batch_idx: int) -> None:
        if self._must_count:
            self._must_count = False
            self._counter = FlopCounterMode(display=False)
            self._counter.__enter__()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        throughput = self._throughput
        if throughput is None:
            return
        samples = self._samples_of(batch)
        tokens = self._length_fn(batch) if self._length_fn is not None else 0
        if self._counter is not None:
            self._take_flops(samples)
        throughput.add(batches=trainer.fit_loop.data.batches_per_item, samples=samples, tokens=tokens)
        if trainer.global_step >= self._due_at_step:
            self._set_due(trainer)
            rates = throughput.rates()
            if rates is not None:
                self._write(trainer, rates)

    @override
    def on_validation_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._paused_at = monotonic()

    @override
    def on_validation_end(self, trainer: Trainer, module: TrainModule) -> None:
        if self._throughput is not None:
            self._throughput.skip(monotonic() - self._paused_at)

    @override
    def teardown(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        self._stop_counting()  # of a first batch that failed or was left out
        self._throughput = None
        self._due_at_step = math.inf

    def _samples_of(self, batch: Any) -> int:
        samples = self._batch_size_fn(batch)
        if samples is None:
            raise RequestError(
                f"ThroughputMonitor finds no tensor in a batch of type {type(batch).__name__} to count samples by: "
                "pass batch_size_fn"
            )
        return samples

    def _take_flops(self, samples: int) -> None:
        flops = self._stop_counting()
        self._flops_per_sample = flops / samples if flops and samples else None
        if self._flops_per_sample is None:
            _log.warning("ThroughputMonitor counted no operations in the first batch: pass flops_per_sample")

    def _stop_counting(self) -> int:
        counter, self._counter = self._counter, None
        if counter is None:
            return 0
        counter.__exit__(None, None, None)
        return int(counter.get_total_flops())

    def _set_due(self, trainer: Trainer) -> None:
        every = trainer.log_every_n_steps
        self._due_at_step = (trainer.global_step // every + 1) * every

    def _write(self, trainer: Trainer, rates: Rates) -> None:
        """Write what all processes do; collective."""
        strategy = trainer.strategy
        of_process = torch.tensor([rates.batches, rates.samples, rates.tokens], device=strategy.root_device)
        means = of_process if strategy.world_size == 1 else strategy.reduce(of_process)
        batches, samples, tokens = means.tolist()
        replicas = strategy.distributed_sampler_kwargs.get("num_replicas", 1)  # the others read the same data
        of_device = {"batches_per_sec": batches, "samples_per_sec": samples}
        if self._length_fn is not None:
            of_device["tokens_per_sec"] = tokens
        values = {f"throughput/{name}": value * replicas for name, value in of_device.items()}
        if self._flops_per_sample is not None:
            of_device["flops_per_sec"] = self._flops_per_sample * samples
            if self._peak is not None:
                of_device["mfu"] = of_device["flops_per_sec"] / self._peak
        values |= {f"throughput/device/{name}": value for name, value in of_device.items()}
        call_loggers(trainer.loggers, "log_metrics", {"epoch": trainer.current_epoch, **values}, trainer.global_step)


def _peak_of(trainer: Trainer) -> float | None:
    device, dtype = trainer.strategy.root_device, trainer.strategy.precision_plugin.compute_dtype
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    peak = peak_flops(name, dtype, allows_tf32=torch.get_float32_matmul_precision() != "highest")
    if peak is None and trainer.is_global_zero:
        _log.info(
            "ThroughputMonitor writes no mfu: the peak of %s in %s is not known, pass available_flops", name, dtype
        )
    return peak
