"""Throughput of a training for the loggers: batches, samples, tokens, FLOPs."""

from __future__ import annotations

import logging
import math
from collections import deque
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.flop_counter import FlopCounterMode
from typing_extensions import override

from dstrat.errors import RequestError
from dstrat.training.callbacks.callback import Callback
from dstrat.training.loggers.defaults import call_loggers
from dstrat.training.metrics.logged import size_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dstrat.training.module.train_module import TrainModule
    from dstrat.training.trainer import Trainer


_log = logging.getLogger(__name__)


class ThroughputMonitor(Callback):
    """Write batches, samples and tokens per second, and the model FLOPs utilization, to the loggers.

    Names are ``throughput/samples_per_sec`` ... for the job, ``throughput/device/samples_per_sec`` ... for one device
    (the mean over the ranks), ``throughput/device/flops_per_sec`` and ``throughput/device/mfu``.  They are written with
    other step values (``log_every_n_steps``), exclude validation, and start after the first batch.  The cost is about a
    microsecond per batch, and one small reduction for each write.

    ``torch.utils.flop_counter`` counts the operations of the first batch, forward and backward, if the peak is known;
    other batches count by their number of samples.  It does not see custom kernels, and counts recomputation for
    activation checkpointing: pass ``flops_per_sample`` in these cases.

    Args:
        batch_size_fn: Returns the number of samples of a batch; by default the length of its first tensor.
        length_fn: Returns the number of tokens of a batch; None counts no tokens.
        window_size: Number of batches to measure over.
        available_flops: Peak operations per second of one device; by default that of common NVIDIA GPUs for the dtype
            of the run's precision (:func:`~dstrat.training.callbacks.throughput_monitor.peak_flops`).
        flops_per_sample: Operations of the training on one sample; None counts them.

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
        self._available_flops, self._declared_flops_per_sample = available_flops, flops_per_sample
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
        self._flops_per_sample = self._declared_flops_per_sample
        self._must_count = self._peak is not None and self._flops_per_sample is None
        self._set_due(trainer)

    @override
    def on_train_batch_start(self, trainer: Trainer, module: TrainModule, batch: Any, batch_idx: int) -> None:
        if self._must_count:  # one batch: counting slows each operation down
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
            flops = self._stop_counting()
            self._flops_per_sample = flops / samples if flops and samples else None
            if self._flops_per_sample is None:
                _log.warning("ThroughputMonitor counted no operations in the first batch: pass flops_per_sample")
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
        self._stop_counting()  # if the first batch has failed or was skipped
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
        """Write the rates of all ranks; collective."""
        strategy = trainer.strategy
        # One tensor, for one reduction.
        of_process = torch.tensor([rates.batches, rates.samples, rates.tokens], device=strategy.root_device)
        means = of_process if strategy.world_size == 1 else strategy.reduce(of_process)
        batches, samples, tokens = means.tolist()
        # Not the world size: ranks that share a replica's model read the same data.
        replicas = strategy.distributed_sampler_kwargs.get("num_replicas", 1)
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
    name = trainer.strategy.accelerator.get_device_name(device)
    if not name:
        return None
    peak = peak_flops(name, dtype, allows_tf32=torch.get_float32_matmul_precision() != "highest")
    if peak is None and trainer.is_global_zero:
        _log.info(
            "ThroughputMonitor writes no mfu: the peak of %s in %s is not known, pass available_flops", name, dtype
        )
    return peak


# Throughput over the last batches


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """Rates of one process, per second.

    Attributes:
        batches: Batches.
        samples: Samples; 0 if they are not counted.
        tokens: Tokens; 0 if they are not counted.
    """

    batches: float
    samples: float
    tokens: float


class Throughput:
    """Rates of batches, samples and tokens over a window of the last batches.

    They are measured on the host: work that is queued on a device counts already, which evens out over the batches.
    For use in your own loop::

        throughput = Throughput(window_size=100)
        for batch in loader:
            train(batch)
            throughput.add(samples=len(batch))
        print(throughput.rates())

    Args:
        window_size: Minimal number of batches to measure over.
    """

    def __init__(self, window_size: int) -> None:
        self._window_size = window_size
        self._ends: deque[tuple[float, int, int, int]] = deque()
        self._batches = self._samples = self._tokens = 0

    def add(self, *, batches: int = 1, samples: int = 0, tokens: int = 0) -> None:
        """Add the batches since the last call.

        Args:
            batches: Number of batches; more than one for a compiled step.
            samples: Number of samples in all of them.
            tokens: Number of tokens in all of them.
        """
        self._batches += batches
        self._samples += samples
        self._tokens += tokens
        self._ends.append((monotonic(), self._batches, self._samples, self._tokens))
        # The first end stays while the second one is within the window: at least window_size batches are measured.
        while self._batches - self._ends[1 if len(self._ends) > 1 else 0][1] >= self._window_size:
            self._ends.popleft()

    def skip(self, seconds: float) -> None:
        """Exclude a time from the measurement, such as a validation."""
        # As if the earlier batches had ended later.
        self._ends = deque((time + seconds, *counts) for time, *counts in self._ends)  # type: ignore[misc]  # mypy forgets the length

    def rates(self) -> Rates | None:
        """Return the rates since the end of the first batch in the window; None before the end of the second batch."""
        if len(self._ends) < 2:
            return None
        (start, *first), (end, *last) = self._ends[0], self._ends[-1]
        batches, samples, tokens = (
            (after - before) / max(end - start, 1e-9) for before, after in zip(first, last, strict=True)
        )
        return Rates(batches=batches, samples=samples, tokens=tokens)


# Peak of common GPUs in floating-point operations per second


_TERA: Mapping[str, Mapping[str, float]] = {
    "H200 NVL": {},  # slower than the H200 below; its figures are unknown
    "H200": {"16": 989.4, "tf32": 494.7, "32": 66.9},
    "H100 PCIe": {"16": 756, "tf32": 378, "32": 51},
    "H100 NVL": {},  # likewise
    "H100": {"16": 989.4, "tf32": 494.7, "32": 66.9},
    "A100": {"16": 312, "tf32": 156, "32": 19.5},
    "A40": {"16": 149.7, "tf32": 74.8, "32": 37.4},
    "A10": {"16": 125, "tf32": 62.5, "32": 31.2},
    "L40S": {"16": 362, "tf32": 183, "32": 91.6},
    "L4": {"16": 121, "tf32": 60, "32": 30.3},
    "V100-SXM2": {"float16": 125, "32": 15.7},
    "V100-PCIE": {"float16": 112, "32": 14},
    "T4": {"float16": 65, "32": 8.1},
    "RTX 3090": {"16": 71, "tf32": 35.6, "32": 35.6},
}


def peak_flops(device_name: str, dtype: torch.dtype, *, allows_tf32: bool) -> float | None:
    """Return the peak operations per second of a GPU in matrix products; None if it is not in the table.

    The figures are for dense matrices and the full clock, from NVIDIA's data sheets, which since the A100 print doubled
    figures for sparse matrices.  Those of the RTX 3090 are from the whitepaper of Ampere GA102, with accumulation in
    float32.  A card with a power limit does not reach them.

    Args:
        device_name: Result of :meth:`Accelerator.get_device_name`, such as ``"NVIDIA H100 80GB HBM3"``.
        dtype: Dtype of the matrix products: float16, bfloat16 or float32.
        allows_tf32: Whether torch may compute float32 products in TensorFloat-32.
    """
    speeds = next((speeds for model_name, speeds in _TERA.items() if _is_model(device_name, model_name)), {})
    for kind in _kinds(str(dtype).removeprefix("torch."), allows_tf32=allows_tf32):
        if kind in speeds:
            return speeds[kind] * 1e12
    return None


def _kinds(dtype: str, *, allows_tf32: bool) -> list[str]:
    """Return the columns of the table for a dtype, fastest first."""
    if dtype == "float32":
        return ["tf32", "32"] if allows_tf32 else ["32"]
    return [dtype, "16"] if dtype in ("float16", "bfloat16") else []


def _is_model(device_name: str, model_name: str) -> bool:
    """Return whether a device is of a model: an A10G is no A10, an RTX 3090 Ti no RTX 3090, a MIG slice no H100."""
    name, model_name = f" {device_name.lower()} ", f" {model_name.lower()}"
    if model_name.startswith(" rtx"):
        return name.endswith(f"{model_name} ")
    return " mig " not in name and (f"{model_name} " in name or f"{model_name}-" in name)
