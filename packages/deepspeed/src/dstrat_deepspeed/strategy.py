"""Training with DeepSpeed's ZeRO: optimizer state, gradients and parameters sharded, by its stage."""

from __future__ import annotations

import gc
import logging
import os
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from typing_extensions import override

from dstrat.errors import MisuseError
from dstrat.parallel.collectives import broadcast_tensors, running_statistics
from dstrat.parallel.optimizer_checks import check_layout
from dstrat.parallel.process_group import DEFAULT_TIMEOUT
from dstrat_deepspeed import internals
from dstrat_deepspeed.checkpoint import CheckpointedStrategy
from dstrat_deepspeed.communication import zero_communication
from dstrat_deepspeed.config import Configuration
from dstrat_deepspeed.engine import Engine, StepModule
from dstrat_deepspeed.memory import zero_layout
from dstrat_deepspeed.nvme import free_buffers, prevent_double_reads, swappers_of
from dstrat_deepspeed.optimizers import (
    check_elementwise,
    check_has_counterpart,
    check_unstepped,
    only_optimizer,
    optimizer_for_cpu,
)
from dstrat_deepspeed.precision import DeepSpeedHalfPrecision
from dstrat_deepspeed.runtime import environment, load_deepspeed, log_level, programs_path, running
from dstrat_deepspeed.user_module import (
    FixedFlags,
    ModuleSnapshot,
    OutsideChanges,
    empty_parameters_refused,
    rematerialize,
)
from dstrat_deepspeed.validation import check_clipping, check_state_buffers, uses_cpu_optimizer
from dstrat_deepspeed.zero3 import check_layers, shard, sharded_creation, store_by_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from datetime import timedelta
    from pathlib import Path

    from torch.nn import Module
    from torch.optim import Optimizer

    from dstrat.interfaces.accelerator import Accelerator
    from dstrat.interfaces.checkpoint_io import CheckpointIO
    from dstrat.interfaces.cluster import ClusterEnvironment
    from dstrat.interfaces.communication import CommunicationLayout
    from dstrat.interfaces.memory import MemoryLayout, TrainingSize
    from dstrat.interfaces.precision import ClipAlgorithm, Precision
    from dstrat.interfaces.strategy import Components, StepName, TrainerLike
    from dstrat_deepspeed.optimizer_state import PartitionedState

_HAS_MASTER_WEIGHTS = ("bf16-true", "16-mixed")  # precisions in which the optimizer has copies of the parameters


class DeepSpeedStrategy(CheckpointedStrategy):
    """Training with DeepSpeed's ZeRO, on CPUs and GPUs, on one or several machines.

    Stage 1 shards the optimizer's state over the ranks, stage 2 gradients too, stage 3 parameters too.  Each of them
    can be offloaded to the CPU, and with stage 3 to files.  The losses equal those of one device.

    Args:
        accelerator: The hardware.
        parallel_devices: The devices of this machine, one for each local rank.
        cluster_environment: The cluster that the job runs on.
        checkpoint_io: The format of checkpoints.
        precision_plugin: The dtypes.
        process_group_backend: Backend of torch.distributed; None is the accelerator's.
        config: DeepSpeed's own configuration, merged over the options: a dict or the path of a JSON file.  None reads
            the file in the environment variable ``DSTRAT_DEEPSPEED_CONFIG_PATH``, if it is set.
        logging_level: The least level of DeepSpeed's own messages: a number of ``logging``, or a name such as
            ``"info"``.
        logging_batch_size_per_gpu: Samples of a batch on one device, for DeepSpeed's own figures only; ``"auto"``
            is 1.
        timeout: Time limit of a collective, after which the job fails.
        start_method: ``"popen"`` (re-run the script), ``"spawn"``, ``"fork"`` or ``"forkserver"``.
        **options: Options of :mod:`dstrat_deepspeed.options`, such as ``stage`` and ``offload_optimizer``.

    Raises:
        RequestError: An option does not exist, or its value is not valid.
        ConflictError: Two options exclude each other.
    """

    compares_replicas = True
    replicates_state = False
    allows_new_optimizers = False  # the engine has the optimizer, and the parameters in its buffers

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        *,
        parallel_devices: Sequence[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        config: Mapping[str, Any] | str | Path | None = None,
        logging_level: int | str = logging.WARNING,
        logging_batch_size_per_gpu: int | str = "auto",
        timeout: timedelta | None = DEFAULT_TIMEOUT,
        start_method: str = "popen",
        **options: Any,
    ) -> None:
        super().__init__(
            accelerator,
            parallel_devices,
            cluster_environment,
            checkpoint_io,
            precision_plugin,
            process_group_backend,
            timeout,
            start_method,
        )
        self._configuration = Configuration(options, config, logging_batch_size_per_gpu)
        self.stage = self._configuration.stage
        self.replicates_state = self.stage == 0
        self.evaluates_together = self.stage == 3  # each step gathers parameters
        self.allows_inference_mode = self.stage != 3  # a forward pass in it breaks the next training step
        self._logging_level = log_level(logging_level)
        self._skipped_steps: int | None = None
        self._deepspeed: Any = None
        self._engine: Engine | None = None
        self._flags: FixedFlags | None = None
        self._snapshot: ModuleSnapshot | None = None
        self._has_failed = False
        self._running = ExitStack()

    def set_components(self, components: Components) -> None:
        super().set_components(components)
        self._configuration.check_components(self.components)

    def precision_for(self, flag: str) -> Precision | None:
        """Return this package's precision if DeepSpeed scales the loss itself; None for the core's."""
        return DeepSpeedHalfPrecision() if flag == "16-mixed" else None

    @override
    def check_training(self, training: TrainingSize) -> None:
        config, optimizer = self._configuration.known, only_optimizer(training.optimizers)
        if optimizer is None or "optimizer" in config:
            return
        if training.device_type != "cpu" and uses_cpu_optimizer(config):
            check_has_counterpart(optimizer)
        check_elementwise(optimizer, self.stage, torch.device("cpu"))

    def memory_layout(self, training: TrainingSize) -> MemoryLayout | None:
        return zero_layout(training, self._configuration.known)

    def communication_layout(self, training: TrainingSize) -> CommunicationLayout | None:
        return zero_communication(training, self._configuration.known)

    # The life cycle

    @property
    def engine(self) -> Any:
        """DeepSpeed's engine, from ``setup`` to ``teardown``; stages 0 to 2 evaluate without one.

        Raises:
            MisuseError: No engine exists now.
        """
        return self._active_engine.engine

    @property
    def _active_engine(self) -> Engine:
        if self._engine is None:
            raise MisuseError(f"{type(self).__name__} has no engine: it is there from setup to teardown of a training")
        return self._engine

    @property
    def _device_rank(self) -> int:
        """Index of the device in this process; that of the rank for devices without one, such as the CPU."""
        index = self.root_device.index
        return self.local_rank if index is None else index

    def __getstate__(self) -> dict[str, Any]:
        # Spawned ranks get a pickled copy of the strategy; what belongs to a run cannot be pickled.
        return {
            **super().__getstate__(),
            "_deepspeed": None,
            "_engine": None,
            "_changes": None,
            "_flags": None,
            "_snapshot": None,
            "_running": ExitStack(),
        }

    def setup_environment(self) -> None:
        self._has_failed = False
        self._deepspeed = load_deepspeed(self.root_device.type, self._logging_level)
        super().setup_environment()
        self._running = ExitStack()
        self._running.enter_context(self._configuration.run_folders())
        self._running.enter_context(
            running(
                self._deepspeed,
                local_rank=self.local_rank,
                device_rank=self._device_rank,
                local_size=len(self.parallel_devices),
                timeout=self.timeout,
            )
        )

    def model_sharded_context(self) -> AbstractContextManager[Any]:
        """Return the context in which stage 3 shards the parameters of each layer at the end of its constructor."""
        if self.stage != 3:
            return nullcontext()
        config = self._configuration.for_creation(self.precision_plugin.flag, self.world_size)
        return sharded_creation(
            self._deepspeed,
            config,
            self._configuration.options.offload.remote_device,
            device_rank=self._device_rank,
        )

    def model_to_device(self) -> None:
        """Move the module to the device, of stage 3 the buffers only."""
        rematerialize(self.module, is_global_zero=self.is_global_zero)
        self._snapshot = ModuleSnapshot(self.module)
        if self.stage != 3:
            super().model_to_device()
            return
        # Parameters move one by one when they are sharded: the full module may not fit on the device.
        for buffer in self.module.buffers():
            buffer.data = buffer.to(self.root_device)

    def wrap_model(self, trainer: TrainerLike) -> None:
        if trainer.is_fitting:
            return  # the engine needs the optimizer too: setup_optimizers, which comes next, makes it
        if self.stage == 3:
            self._open_engine(trainer, None)
        else:
            super().wrap_model(trainer)

    def setup_optimizers(self, trainer: TrainerLike) -> None:
        super().setup_optimizers(trainer)
        self._open_engine(trainer, only_optimizer(self.optimizers))

    def _open_engine(self, trainer: TrainerLike, optimizer: Optimizer | None) -> None:
        config = self._checked_config(trainer, optimizer)
        if "activation_checkpointing" in config:
            section = config["activation_checkpointing"]
            self._running.enter_context(internals.activation_checkpointing(self._deepspeed, section))
        if self.stage == 3:
            self._running.enter_context(internals.compiled_without_wrappers(self.module))
        store_by_rows(self.module)
        broadcast_tensors(self.module.buffers())  # DeepSpeed broadcasts the parameters only
        # It may compile here, and ninja may be in this Python's environment alone.
        with internals.scalars_as_bytes(), environment({"PATH": programs_path(os.environ)}):
            if self.stage == 3:
                shard(self._deepspeed, self.module, config, device_rank=self._device_rank)
                prevent_double_reads(self.module)
            if optimizer is not None and uses_cpu_optimizer(config):
                optimizer = optimizer_for_cpu(optimizer)
            self._engine = Engine(
                self._deepspeed,
                StepModule(self.module, self.precision_plugin.forward_context),
                optimizer,
                config,
                is_manual=not getattr(self.module, "automatic_optimization", True),
                device_rank=self._device_rank,
            )
            if self.stage == 3:
                self._running.enter_context(empty_parameters_refused(self.module))
        if optimizer is None:  # the configuration may name one
            check_elementwise(self._engine.optimizer, self.stage, self.root_device)
        self.model = self._engine.engine
        self.optimizers = [] if self._engine.optimizer is None else [self._engine.optimizer]
        state = self._partitioned(self.optimizers[0]) if self.optimizers else None
        if state is not None:
            state.init_adagrad()
            self._watch_weights(state)
        if optimizer is not None and self._steps_flat_tensors:
            name = type(self).__name__
            self.refuse_steps(
                lambda: dict(self.module.named_parameters()),
                f"which {name} steps in flat tensors of its own, and whose gradients it synchronizes for one optimizer "
                "only: return one optimizer of all parameters from configure_optimizers, in groups if they differ",
            )

    def _checked_config(self, trainer: TrainerLike, optimizer: Optimizer | None) -> dict[str, Any]:
        """Return the configuration of a run, after checking that DeepSpeed can train the module and the optimizer."""
        if optimizer is not None:
            check_layers(self.module, stage=self.stage, world_size=self.world_size)
        flag = self.precision_plugin.flag
        if optimizer is not None and self._steps_flat_tensors:
            check_unstepped(optimizer)
            check_layout(optimizer)
        config = self._configuration.for_run(trainer, optimizer, flag=flag, world_size=self.world_size)
        check_elementwise(optimizer, self.stage, self.root_device)
        if optimizer is not None:
            check_state_buffers(config, optimizer.param_groups, self.world_size)
        return config

    @property
    def _steps_flat_tensors(self) -> bool:
        """Whether the engine's optimizer steps flat tensors in place of the module's parameters."""
        return self.stage > 0 or self.precision_plugin.flag in _HAS_MASTER_WEIGHTS

    def _watch_weights(self, state: PartitionedState) -> None:
        names = self._names()
        parameters = {names[id(parameter)]: parameter for parameter in self.module.parameters()}
        watched = {name: p for name, p in parameters.items() if p.requires_grad or self.stage == 3}
        self._changes = OutsideChanges(watched, state)
        if self.stage == 3:
            self._running.enter_context(self._changes.observed_shards(self._wrapped_optimizer))
        self._flags = FixedFlags(parameters)

    def on_exception(self, exception: BaseException) -> None:
        self._has_failed = True
        try:
            self._close_engine(can_gather=self.world_size == 1)
        finally:
            gc.collect()  # stage 3 has set methods on parameters that hold process groups, in cycles
            super().on_exception(exception)

    def teardown(self) -> None:
        can_gather = not self._has_failed
        try:
            if can_gather:
                self._accept_changes()
                if self._changes is not None:
                    self._changes.check_shards()
        except BaseException:
            can_gather = self.world_size == 1  # the error may be this rank's only: others would not join a gather
            raise
        finally:
            self._close_engine(can_gather=can_gather)
            super().teardown()
            if self._snapshot is not None:
                self._snapshot.move_lost_to_meta()
                self._snapshot = None

    def _close_engine(self, *, can_gather: bool) -> None:
        """Restore the user's module, of stage 3 on rank 0, and free the engine; collective if it gathers.

        Args:
            can_gather: Whether all ranks take part; without a gather the parameters of stage 3 are lost.
        """
        engine, self._engine = self._engine, None
        self._changes = self._flags = None
        self._state = None
        if engine is not None:
            self._skipped_steps = engine.skipped_steps
        # Callbacks run in reverse order, each also if another fails.  Gathering comes first, while the process groups
        # are open; the engine closes before its attributes are removed from the module.
        with ExitStack() as ending:
            ending.callback(self._running.close)
            ending.callback(internals.restore_linear)
            if self._snapshot is not None:
                ending.callback(free_buffers, swappers_of(self.module))
                ending.callback(self._snapshot.remove)
            if engine is not None:
                self.model = self.module
                ending.callback(engine.close)
            if self._snapshot is not None and can_gather:
                self._snapshot.gather(keeps=self.is_global_zero)

    # Steps

    def run_step(self, name: StepName, step: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if name == "training_step":
            if self._flags is not None:
                self._flags.check()
            self._accept_changes()
            if self._changes is not None:
                self._changes.compare_gathered()
            return self._active_engine.train(step, *args, **kwargs)
        if self.stage == 3:  # the engine gathers parameters, and opens the precision's context
            return self._active_engine.evaluate(step, *args, **kwargs)
        return super().run_step(name, step, *args, **kwargs)

    def evaluation_context(self) -> AbstractContextManager[Any]:
        self.broadcast_tensors(running_statistics(self.module))
        return super().evaluation_context()

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        if loss.numel() != 1 or not loss.requires_grad:  # DeepSpeed has a bare assert; torch raises RuntimeError
            raise RuntimeError(f"gradients need one number that requires them, and the loss is {loss!r}")
        if self.module_backward is None and not (args or kwargs):
            self._active_engine.backward(loss)
            return
        compute = self.module_backward or Tensor.backward
        self._active_engine.backward(loss, lambda scaled: compute(scaled, *args, **kwargs))

    @contextmanager
    def no_backward_sync(self) -> Iterator[None]:
        """Let backward passes in a ``with`` block accumulate gradients without reducing them."""
        engine = self._engine
        if engine is None:
            yield
            return
        engine.set_boundary(is_boundary=False)
        try:
            yield
        finally:
            engine.set_boundary(is_boundary=True)

    @override
    def scale_gradients(self, optimizer: Optimizer, factor: float | Tensor) -> None:
        self._active_engine.scale_gradients(factor)

    @override
    def clip_gradients(self, optimizer: Optimizer, clip_val: float, algorithm: ClipAlgorithm = "norm") -> None:
        """Set the norm by which the engine clips in its next step, where it has the norm of all ranks' gradients."""
        check_clipping(algorithm)
        self._active_engine.clip(clip_val)

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: Module | None = None,
        **kwargs: Any,
    ) -> Any:
        output = closure()
        self.check_replicas()  # after the step ranks have those of the rank that steps them
        self._accept_changes()
        self._active_engine.step()
        if self._changes is not None:
            self._changes.after_step()
        return output

    @override
    def replicated_parameters(self) -> dict[str, Tensor]:
        return {} if self.stage == 3 else dict(self.module.named_parameters())

    # Gradients

    @property
    def skipped_steps(self) -> int:
        """Number of optimizer steps skipped in this training, or the last one, because of non-finite gradients."""
        if self._engine is None and self._skipped_steps is not None:
            return self._skipped_steps
        return self._active_engine.skipped_steps

    def full_grad(self, parameter: Tensor) -> Tensor | None:
        """Return the full gradient of a parameter, between the last backward pass and the step; collective.

        Args:
            parameter: A parameter of the module.

        Returns:
            The mean over the ranks, in the parameter's full shape; None if it has no gradient.
        """
        return self._active_engine.full_grad(parameter)

    def grad_norm(self) -> float:
        """Return the norm of all gradients, before clipping; collective.

        Between the last backward pass and the step it is the norm of the current gradients, afterwards that of the last
        step's.
        """
        return self._active_engine.grad_norm()
