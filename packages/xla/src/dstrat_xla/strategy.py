"""Strategies with one XLA device in each process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from dstrat.builtin.single_device import SingleDeviceStrategy
from dstrat.errors import ConflictError, DeviceError
from dstrat.interfaces.communication import Collective, CommunicationLayout
from dstrat.parallel.gradient_sync import GradientSyncStrategy
from dstrat.parallel.process_group import DEFAULT_TIMEOUT
from dstrat_xla import runtime
from dstrat_xla.lazy import LazySteps

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from datetime import timedelta

    from torch import Tensor

    from dstrat.interfaces.accelerator import Accelerator
    from dstrat.interfaces.checkpoint_io import CheckpointIO
    from dstrat.interfaces.cluster import ClusterEnvironment
    from dstrat.interfaces.memory import TrainingSize
    from dstrat.interfaces.precision import Precision
    from dstrat.interfaces.strategy import Components, TrainerLike


class SingleDeviceXLAStrategy(LazySteps, SingleDeviceStrategy):
    """Training on one XLA device, without any communication.

    Args:
        device: The device; None takes the first that the accelerator offers.
        accelerator: The hardware.
        checkpoint_io: How checkpoints reach storage.
        precision_plugin: The precision: dtypes, casts, loss scaling.
        debug: Whether torch_xla reports compilations and slow operations (``PT_XLA_DEBUG``).
    """

    def __init__(
        self,
        device: torch.device | str | int | None = None,
        accelerator: Accelerator | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        debug: bool = False,
    ) -> None:
        device = torch.device("xla", device) if isinstance(device, int) else device
        super().__init__(device, accelerator, checkpoint_io, precision_plugin)
        self.debug = debug

    def setup_environment(self) -> None:
        if self.debug:
            runtime.report_compilations()
        super().setup_environment()


class XLAStrategy(LazySteps, GradientSyncStrategy):
    """Training with one process for each XLA device: a replica in each, gradients averaged inside the graph.

    Objects and values that are read (logged values, votes, barriers) are exchanged by gloo between the hosts.  All
    processes must record the same graph, or the devices wait for each other: in each step the same parameters must
    have a gradient.

    XLA's CPU backend has no collectives between processes.  There ``reduce_on_host`` averages gradients over gloo,
    which is slow, and good for tests.

    Args:
        accelerator: The hardware.
        parallel_devices: The devices of this machine, one for each local rank.
        checkpoint_io: How checkpoints reach storage.
        precision_plugin: The precision: dtypes, casts, loss scaling.
        debug: Whether torch_xla reports compilations and slow operations (``PT_XLA_DEBUG``).
        sync_module_states: Whether all processes begin with the parameters and buffers of global rank 0.
        cluster_environment: Where the job runs.
        reduce_on_host: Whether gradients are averaged on the hosts rather than inside the graph.
        timeout: How long a process waits for the others before the job fails.
        start_method: ``"popen"`` (re-run the script), ``"spawn"``, ``"fork"`` or ``"forkserver"``.
    """

    compares_replicas = False  # norms of parameters would compile a further graph
    uses_torch_distributed = False  # not for tensors on the devices

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: Sequence[torch.device] | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        debug: bool = False,
        sync_module_states: bool = True,
        cluster_environment: ClusterEnvironment | None = None,
        reduce_on_host: bool = False,
        timeout: timedelta | None = DEFAULT_TIMEOUT,
        start_method: str | None = None,
    ) -> None:
        super().__init__(
            accelerator,
            parallel_devices,
            cluster_environment,
            checkpoint_io,
            precision_plugin,
            "gloo",
            timeout,
            start_method,
        )
        self.debug, self.sync_module_states, self.reduce_on_host = debug, sync_module_states, reduce_on_host
        self.gradients_may_lack = reduce_on_host  # inside the graph, ranks with other gradients would wait for ever

    def set_components(self, components: Components) -> None:
        super().set_components(components)
        num_processes = max(len(self.parallel_devices), self.world_size)
        if num_processes > 1 and not self.reduce_on_host and runtime.pjrt_device() == "CPU":
            raise ConflictError(
                f"strategy 'xla' needs collectives for {num_processes} processes, which XLA's CPU backend "
                f"({runtime.PJRT_DEVICE}=CPU) has not: choose 'xla_spmd', devices=1, or for tests "
                "XLAStrategy(reduce_on_host=True)"
            )
        if num_processes > 1 and (count := runtime.devices_per_process()) > 1:
            raise ConflictError(
                f"strategy 'xla' drives one device in each process, and a process of this TPU (v2 or v3) has {count}: "
                "choose 'xla_spmd', which drives all devices from one process"
            )

    @property
    def root_device(self) -> torch.device:
        """The device of this process, the only one that it sees if there are several processes."""
        return self.parallel_devices[0] if self.world_size == 1 else torch.device("xla", 0)

    @property
    def assigned_device(self) -> torch.device:
        return self.root_device

    # The life cycle

    def setup_environment(self) -> None:
        if self.debug:
            runtime.report_compilations()
        if self.world_size > 1:
            # Before anything asks for a device, which would start the runtime with all devices of the machine.
            runtime.start_in_rank(self.local_rank, len(self.parallel_devices))
        super().setup_environment()
        self._check_runtime()

    def _check_runtime(self) -> None:
        """Raise DeviceError if the runtime has another number of processes than the job."""
        if self.reduce_on_host or self.world_size == 1:
            return
        seen = runtime.world_size()
        if seen != self.world_size:
            raise DeviceError(
                f"the job has {self.world_size} processes, and XLA's runtime sees {seen} devices with one process "
                "each, so that gradients would not be averaged: choose 'xla_spmd', or one process for each device"
            )

    def communication_layout(self, training: TrainingSize) -> CommunicationLayout | None:
        # One operation of the graph for all gradients, after the backward pass; buffers are those of global rank 0.
        ranks, gradients, buffers = training.world_size, training.trainable_parameters, training.module_buffers
        collectives = [Collective(kind="all_reduce", bytes=gradients, messages=1, ranks=ranks)]
        if buffers:
            collectives.append(Collective(kind="broadcast", bytes=buffers, messages=1, ranks=ranks))
        return CommunicationLayout(collectives=tuple(collectives), copied=2 * gradients)  # they are scaled

    def wrap_model(self, trainer: TrainerLike) -> None:
        if self.sync_module_states:
            super().wrap_model(trainer)
        self.mark_step()  # the graph of the first step would have these copies too, and be compiled for itself

    # Communication

    def synchronize_gradients(self, gradients: Sequence[Tensor]) -> None:
        if self.reduce_on_host:
            # In one transfer: one by one, each would compile and run the backward pass up to it again.
            for gradient, value in zip(gradients, runtime.fetch(gradients), strict=True):
                gradient.copy_(super().reduce(value))
        else:
            xla_model = runtime.xla_model()
            xla_model.all_reduce(xla_model.REDUCE_SUM, list(gradients), scale=1.0 / self.world_size)

    def broadcast_tensors(self, tensors: Iterable[Tensor]) -> None:
        tensors = [tensor.detach() for tensor in tensors]
        # Not runtime.fetch, which donates buffers of recorded tensors: these are views of tensors that use them.
        on_host = [tensor.cpu() for tensor in tensors]
        super().broadcast_tensors(on_host)
        with torch.no_grad():
            for tensor, value in zip(tensors, on_host, strict=True):
                tensor.copy_(value)

    # On the host: whoever reduces or gathers a value reads it, which cuts the graph anyway.

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        if not isinstance(tensor, torch.Tensor):
            return tensor
        return super().reduce(tensor.cpu(), group, reduce_op).to(tensor.device)

    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        return super().all_gather(tensor.cpu(), group, sync_grads).to(tensor.device)
