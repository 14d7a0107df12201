"""Training with FairScale's FullyShardedDataParallel, on GPUs."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import ModuleDict, ModuleList
from typing_extensions import override

from dstrat.builtin.precision.mixed import MixedPrecision
from dstrat.errors import ConflictError, RequestError
from dstrat.interfaces.communication import Collective, CommunicationLayout
from dstrat.interfaces.memory import MemoryLayout
from dstrat.interfaces.state_dict import load_by_names
from dstrat.parallel.collectives import running_statistics
from dstrat.parallel.optimizer_checks import check_layout, check_optimizers, how_flat_pieces_fail
from dstrat.parallel.process_group import DEFAULT_TIMEOUT
from dstrat.parallel.step_module import StepModule
from dstrat.parallel.strategy import ParallelStrategy
from dstrat_fairscale import flat_state
from dstrat_fairscale.internals import (
    FullyShardedDataParallel,
    ShardedGradScaler,
    auto_wrap,
    default_auto_wrap_policy,
    enable_wrap,
    leave_deprecations_out,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import timedelta

    from torch.nn import Module
    from torch.optim import Optimizer

    from dstrat.interfaces.accelerator import Accelerator
    from dstrat.interfaces.checkpoint_io import CheckpointIO
    from dstrat.interfaces.cluster import ClusterEnvironment
    from dstrat.interfaces.memory import TrainingSize
    from dstrat.interfaces.precision import ClipAlgorithm, Precision
    from dstrat.interfaces.strategy import Components, StepName, TrainerLike


class DDPFullyShardedStrategy(ParallelStrategy):
    """Training with FairScale's FullyShardedDataParallel, which needs CUDA; FSDPStrategy runs anywhere.

    Layers may wrap themselves in ``configure_model`` with FairScale's ``wrap`` and ``auto_wrap``.

    Args:
        accelerator: The hardware.
        parallel_devices: The devices of this machine, one for each local rank.
        cluster_environment: The cluster that the job runs on.
        checkpoint_io: The format of checkpoints.
        process_group_backend: Backend of torch.distributed; None takes the accelerator's.
        timeout: How long a rank waits for the others before the job fails.
        start_method: ``"popen"`` (re-run the script), ``"spawn"``, ``"fork"`` or ``"forkserver"``.
        precision_plugin: The precision; parameters are gathered in the dtype that it computes in.
        cpu_offload: Whether shards and the optimizer's step are on the CPU.
        flatten_parameters: Whether the parameters of a wrapped layer are one tensor.
        reshard_after_forward: Whether layers are freed between their forward and backward passes.
        move_grads_to_cpu: Whether gradients go to the CPU after their reduction; None follows ``cpu_offload``.
        fp32_reduce_scatter: Whether gradients are summed in float32; None does so unless parameters are smaller.
        compute_dtype: Dtype of forward and backward passes; None follows the precision.
        bucket_cap_mb: Size of the buckets in which small gradients are reduced, in MB.
        min_num_params: The least number of parameters of layers that are wrapped by themselves.
        state_dict_to_cpu: Whether states are gathered on the CPU.

    Raises:
        ConflictError: It gets an accelerator other than CUDA.
    """

    replicates_state = False
    evaluates_together = True  # each step gathers parameters
    allows_inference_mode = False

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: Sequence[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = DEFAULT_TIMEOUT,
        start_method: str = "popen",
        cpu_offload: bool = False,
        flatten_parameters: bool = True,
        reshard_after_forward: bool = True,
        move_grads_to_cpu: bool | None = None,
        fp32_reduce_scatter: bool | None = None,
        compute_dtype: torch.dtype | None = None,
        bucket_cap_mb: int = 25,
        min_num_params: int = 100_000_000,
        state_dict_to_cpu: bool = True,
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
        self._compute_dtype = compute_dtype
        self._fp32_reduce_scatter = fp32_reduce_scatter
        self._min_num_params = min_num_params
        self._state_dict_to_cpu = state_dict_to_cpu
        self._options = {
            "cpu_offload": cpu_offload,
            "flatten_parameters": flatten_parameters,
            "reshard_after_forward": reshard_after_forward,
            "move_grads_to_cpu": move_grads_to_cpu,
            "bucket_cap_mb": bucket_cap_mb,
        }

    def set_components(self, components: Components) -> None:
        super().set_components(components)
        if any(device.type != "cuda" for device in self.components.parallel_devices or ()):
            raise ConflictError(
                f"{type(self).__name__} is FairScale's, which shards on CUDA devices only, and this is the accelerator "
                f"{self.parallel_devices[0].type!r}: use strategy='fsdp', which runs here too"
            )

    def precision_for(self, flag: str) -> Precision | None:
        """Return a precision whose loss scale is adapted by all ranks together, where the flag scales the loss."""
        return MixedPrecision(flag, scaler=ShardedGradScaler()) if flag == "16-mixed" else None

    def forward_dtype(self, precision: Precision) -> torch.dtype:
        return self._compute_dtype or precision.compute_dtype

    def memory_layout(self, training: TrainingSize) -> MemoryLayout | None:
        ranks, computed = training.world_size, self._compute_dtype or training.precision.compute_dtype
        has_copies = computed != training.precision.param_dtype  # shards in the dtype of the computation
        units, root = unit_sizes(training.module, self._min_num_params)
        # A unit is gathered while the gradients of the one before are reduced, in a copy.
        gathered = (2 * root + 3 * max(units, default=0)) * computed.itemsize
        layout, copies = training.replicated, math.ceil(training.trainable_numel * computed.itemsize / ranks)
        if self._options["cpu_offload"]:
            shards = layout.parameters + layout.gradients + layout.optimizer_state
            return MemoryLayout(
                parameters=copies, gradients=0, optimizer_state=0, step_buffers=gathered, host=math.ceil(shards / ranks)
            )
        return MemoryLayout(
            parameters=math.ceil(layout.parameters / ranks),
            gradients=math.ceil(layout.gradients / ranks),
            optimizer_state=math.ceil(layout.optimizer_state / ranks),
            optimizer_temporaries=math.ceil(layout.optimizer_temporaries / ranks),
            step_buffers=gathered + (copies if has_copies else 0),
        )

    def communication_layout(self, training: TrainingSize) -> CommunicationLayout | None:
        computed = self._compute_dtype or training.precision.compute_dtype
        units, root = unit_sizes(training.module, self._min_num_params)
        gathers = 2 if self._options["reshard_after_forward"] else 1  # of a layer; the module itself stays gathered
        summed = 4 if self._fp32_reduce_scatter else computed.itemsize
        batches, ranks = training.accumulate_grad_batches, training.world_size
        gather = Collective(
            kind="all_gather",
            bytes=batches * (gathers * sum(units) + root) * computed.itemsize,
            messages=batches * (gathers * len(units) + 1),
            ranks=ranks,
            overlaps=True,
            in_each_batch=True,
        )
        reduction = Collective(
            kind="reduce_scatter",
            bytes=training.trainable_numel * summed,
            messages=len(units) + 1,
            ranks=ranks,
            overlaps=True,
        )
        # Shards are cast for a gather; gradients are copied into a bucket, and scaled when they are reduced.
        copied = 2 * gather.bytes // ranks + 2 * reduction.bytes + 2 * reduction.bytes // ranks
        return CommunicationLayout(collectives=(gather, reduction), copied=copied)

    # Sharding

    def model_sharded_context(self) -> AbstractContextManager[Any]:
        """Return the context in which FairScale's ``wrap`` and ``auto_wrap`` shard layers as they are made."""
        context: AbstractContextManager[Any] = enable_wrap(
            auto_wrap_policy=self._wrap_policy, wrapper_cls=FullyShardedDataParallel, **self._fairscale_options()
        )
        return context

    @override
    def wrap_model(self, trainer: TrainerLike) -> None:
        leave_deprecations_out()
        with self.model_sharded_context():
            for name, child in list(self.module.named_children()):
                setattr(self.module, name, auto_wrap(child))
        # Joined in the root, which is around the module, its own parameters would be none of the module's.
        options = {**self._fairscale_options(), "flatten_parameters": False}
        self.model = FullyShardedDataParallel(StepModule(self.module), **options)

    def setup_optimizers(self, trainer: TrainerLike) -> None:
        super().setup_optimizers(trainer)
        check_optimizers(self.optimizers, self.module)
        for optimizer in self.optimizers:
            check_layout(optimizer)
            reason = how_flat_pieces_fail(optimizer, self.root_device)
            if reason is not None:
                raise RequestError(
                    f"{type(optimizer).__name__} needs whole parameters, and {type(self).__name__} lets each rank step "
                    f"flat pieces of some ({reason}): take an optimizer that treats each element by itself, such as "
                    'torch.optim.AdamW, or choose strategy="fsdp", which shards each parameter'
                )

    @property
    def _wrap_policy(self) -> Any:
        return partial(default_auto_wrap_policy, min_num_params=self._min_num_params)

    def _fairscale_options(self) -> dict[str, Any]:
        precision = self.precision_plugin
        computed = self._compute_dtype or precision.compute_dtype
        mixed = computed != precision.param_dtype
        reduces_in_32 = mixed if self._fp32_reduce_scatter is None else self._fp32_reduce_scatter
        return {
            **self._options,
            "mixed_precision": mixed,
            "compute_dtype": computed,
            "fp32_reduce_scatter": reduces_in_32 and mixed,
            "state_dict_device": torch.device("cpu") if self._state_dict_to_cpu else None,
            "compute_device": self.root_device,
        }

    # Steps

    def run_step(self, name: StepName, step: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        return super().run_step(name, partial(self.model, step), *args, **kwargs)

    def evaluation_context(self) -> AbstractContextManager[Any]:
        self.broadcast_tensors(running_statistics(self.module))
        return super().evaluation_context()

    def no_backward_sync(self) -> AbstractContextManager[Any]:
        """Return a context in which gradients accumulate without being reduced."""
        if isinstance(self.model, FullyShardedDataParallel):
            context: AbstractContextManager[Any] = self.model.no_sync()
            return context
        return nullcontext()

    def clip_gradients(self, optimizer: Optimizer, clip_val: float, algorithm: ClipAlgorithm = "norm") -> None:
        """Clip the gradients of all parameters by their norm on all ranks together, or the values of an optimizer's."""
        self.unscale_gradients(optimizer)
        if algorithm == "norm":
            self.model.clip_grad_norm_(clip_val)
        else:
            super().clip_gradients(optimizer, clip_val, algorithm)

    # State: FairScale gathers it

    def sharded_module_state(self) -> dict[str, Any]:
        """Return the full state of the module on each rank; collective."""
        return {name.removeprefix("module."): value for name, value in self.model.state_dict().items()}

    def load_sharded_module_state(self, state: dict[str, Any]) -> None:
        """Load a full state, which each rank has; collective."""
        load_by_names(self.model, {f"module.{name}": value for name, value in state.items()})

    def local_weights(self) -> dict[str, Any]:
        """Raise an error: FairScale's shards are of joined parameters.

        Raises:
            ConflictError: Always.
        """
        raise ConflictError(
            f"{type(self).__name__} has shards of flat tensors, in which FairScale joins parameters without "
            "their names; strategy='fsdp' can"
        )

    def parameter_names(self, optimizer: Optimizer) -> list[list[str]]:
        """Return the names of the parameters of each group, before FairScale has joined them."""
        return flat_state.names_of_groups(optimizer, self.module)

    def sharded_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of an optimizer by the names of parameters, with this rank's shards."""
        return flat_state.sharded_state(optimizer, self.module, self.global_rank)

    def load_sharded_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Load a result of :meth:`sharded_optimizer_state`, or the same with full tensors.

        Raises:
            CheckpointError: It is the state of other parameters.
        """
        flat_state.load_state(optimizer, self.module, self.global_rank, state)


def unit_sizes(module: Module, min_num_params: int) -> tuple[list[int], int]:
    """Return the elements of each layer that FairScale's policy wraps, and of the parameters outside of these.

    Args:
        module: A module that is not wrapped yet.
        min_num_params: The least number of elements of a wrapped layer, without those of wrapped layers in it.
    """
    units: list[int] = []
    outside = sum(parameter.numel() for parameter in module.parameters(recurse=False))
    for child in module.children():
        inner, remaining = unit_sizes(child, min_num_params)
        units += inner
        if remaining >= min_num_params and not isinstance(child, ModuleList | ModuleDict):
            units.append(remaining)
        else:
            outside += remaining
    return units, outside
