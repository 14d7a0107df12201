"""MeshStrategy: stages, replicas, shards, divided sequences and split layers on a mesh of devices."""

from __future__ import annotations

import functools
import math
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from typing_extensions import override

from dstrat.errors import ConflictError, MisuseError, RequestError
from dstrat.interfaces.strategy import CompiledSteps
from dstrat.parallel.activation_memory import ActivationMemory
from dstrat.parallel.internals import new_connections
from dstrat.parallel.layers import checked_policy
from dstrat.parallel.process_group import DEFAULT_TIMEOUT
from dstrat_fsdp import internals
from dstrat_fsdp.gradients import clip_by_norm
from dstrat_fsdp.memory import estimated_blocks
from dstrat_fsdp.mesh import open_mesh
from dstrat_fsdp.options import offloads_to_host, precision_policy, state_dict_type_name
from dstrat_fsdp.parameters import check_stages, is_parked
from dstrat_fsdp.shared_batch import SharedBatchStrategy, check_splits_layers
from dstrat_fsdp.wrap_policy import blocks_of
from dstrat_mesh.attention import METHODS, checked_method
from dstrat_mesh.axes import (
    CONTEXT,
    PIPELINE,
    REPLICATE,
    SHARD,
    TENSOR,
    Axes,
    checked_size,
    layouts,
    similar_schedules,
)
from dstrat_mesh.checks import check_backward, check_estimated_module, check_pipeline, check_steps_stages
from dstrat_mesh.estimate import MeshEstimate
from dstrat_mesh.experts import ExpertParallelism, common_number_of_experts, experts_of, with_experts
from dstrat_mesh.pipeline import PipelineRun, estimated_stages, number_of_layers
from dstrat_mesh.schedule import Schedule
from dstrat_mesh.sequences import Sequences, check_sequences
from dstrat_mesh.stages import LayerRandomNumbers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager
    from datetime import timedelta

    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
    from torch.nn import Module
    from torch.optim import Optimizer

    from dstrat.interfaces.accelerator import Accelerator
    from dstrat.interfaces.checkpoint_io import CheckpointIO
    from dstrat.interfaces.cluster import ClusterEnvironment
    from dstrat.interfaces.communication import CommunicationLayout
    from dstrat.interfaces.memory import MemoryLayout, Stage, TrainingSize
    from dstrat.interfaces.precision import ClipAlgorithm, Precision
    from dstrat.interfaces.strategy import StepName, TrainerLike
    from dstrat.parallel.layers import LayerClasses, LayerPolicy
    from dstrat_fsdp.sharded_module import Sharding
    from dstrat_fsdp.wrap_policy import WrapPolicy


class MeshStrategy(SharedBatchStrategy):
    """Training on a mesh of devices, whose axes are the kinds of parallelism.

    The names of the axes are those of torchtitan.  Parameters, gradients and optimizer state are sharded over
    ``dp_shard``, as by FSDPStrategy; ``dp_replicate`` has replicas of the shards; with ``tp`` the module splits its
    layers in ``configure_model``, where ``device_mesh["tp"]`` is the group of ranks that share a batch::

        def configure_model(self):
            mesh = self.device_mesh["tp"]
            parallelize_module(self.mlp, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})

    With ``pp`` a rank has the layers of one stage only, as the module's ``configure_pipeline`` returns them (see
    :class:`~dstrat.Pipeline`).  A training step divides the batch into microbatches, and runs their forward and
    backward passes in the order of the schedule; dropout draws other random numbers than on one device.  Evaluation
    steps run on all stages, and call the pipeline's model, whose output is sent to each of them.

    With ``cp`` each rank computes a part of every sequence, and ``scaled_dot_product_attention`` attends to all of
    them.  Everything else that a module computes between tokens sees those of one part, so positions are a tensor of
    the batch.  All tensors of a batch are cut along their second dimension, or as the module's
    ``cut_sequences(batch, cut)`` does it.  Parts count alike in the mean of their losses, unless ``training_step``
    returns a weight: ``{"loss": loss, "weight": number_of_labels}``.  Predicted tensors are those of whole sequences by
    the module's ``join_sequences(outputs, join)``, which calls ``join`` for those that are parts.

    With ``ep`` a rank has a share of the experts in the layers that the module's ``configure_experts`` returns, and
    tokens go to the ranks of their experts.  These ranks are neighbours along ``dp_shard``, ``cp`` and ``tp``.

    Args:
        accelerator: The hardware.
        parallel_devices: The devices of this machine, one for each local rank.
        cluster_environment: The cluster that the job runs on.
        checkpoint_io: The format of checkpoints.
        precision_plugin: The precision; parameters are gathered in the dtype that it computes in.
        process_group_backend: Backend of torch.distributed; None takes the accelerator's.
        timeout: How long a rank waits for the others before the job fails.
        start_method: ``"popen"`` (re-run the script), ``"spawn"``, ``"fork"`` or ``"forkserver"``.
        dp_replicate: Number of replicas of the shards, which read different batches.
        dp_shard: Number of ranks over which a replica is sharded, which read different batches; "auto" is what the
            other axes leave of the processes.
        tp: Number of ranks over which layers are split, which read the same batch.
        cp: Number of ranks that divide sequences; they read the same batch, and have shards of a replica too.
        context_parallel: ``"ulysses"``, which exchanges heads, or ``"ring"``, which sends keys and values around and
            takes neither masks nor dropout.
        ep: Number of ranks that divide experts, a divisor of ``dp_shard * cp * tp`` and a multiple of ``tp``.
        pp: Number of ranks with different stages of the model; the ranks of a pipeline read the same batch.
        schedule: ``"1F1B"``, or ``"GPipe"``, which keeps the activations of all microbatches; or these with several
            stages on a rank, which is idle for a shorter time: ``"Interleaved1F1B"`` and ``"LoopedBFS"``.  Or
            ``"InterleavedZeroBubble"``, with any number of stages on a rank, which computes gradients of weights when
            it would be idle, and keeps activations until then.
        stages_per_rank: Number of stages of each rank; None for 1, or 2 where the schedule has several.
        microbatches: Number of microbatches of a batch; None for as many as ``pp``.
        cpu_offload: Whether shards and the optimizer's step are on the CPU; True, or torch's policy.
        mixed_precision: Torch's policy of dtypes; None takes that of the precision plugin.
        auto_wrap_policy: The blocks that are gathered together: classes of layers, a function of a module, or the least
            number of parameters; None takes the module's ``auto_wrap_policy``, if it has one, or else repeated layers.
        activation_checkpointing: What is not saved for the backward pass, and computed again: ``"full"`` or
            ``"selective"`` for repeated layers, or classes of layers.
        activation_checkpointing_policy: The layers, as classes or a function of a module.
        activation_offload: Whether repeated layers save their activations on the host; True, or the layers.
        reshard_after_forward: Whether blocks are freed between their forward and backward passes.  None frees them, but
            for a pipeline, which would gather them in both passes of each microbatch: there they stay gathered for a
            batch, as unreduced gradients do.
        state_dict_type: The parameters after a run: ``"sharded"``, or ``"full"`` on each rank.

    Raises:
        RequestError: An option has an impossible value.
    """

    def __init__(
        self,
        *,
        dp_replicate: int = 1,
        dp_shard: int | str = "auto",
        tp: int = 1,
        cp: int = 1,
        context_parallel: str = "ulysses",
        pp: int = 1,
        ep: int = 1,
        schedule: str = "1F1B",
        stages_per_rank: int | None = None,
        microbatches: int | None = None,
        accelerator: Accelerator | None = None,
        parallel_devices: Sequence[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = DEFAULT_TIMEOUT,
        cpu_offload: bool | CPUOffloadPolicy | None = None,
        mixed_precision: MixedPrecisionPolicy | None = None,
        auto_wrap_policy: WrapPolicy | None = None,
        activation_checkpointing: LayerClasses | str | None = None,
        activation_checkpointing_policy: LayerPolicy | None = None,
        activation_offload: bool | LayerPolicy = False,
        reshard_after_forward: bool | None = None,
        state_dict_type: str = "sharded",
        start_method: str = "popen",
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
        self._dp_replicate: int = checked_size("dp_replicate", dp_replicate)
        self._dp_shard: int | str = checked_size("dp_shard", dp_shard, or_auto=True)
        self._tp: int = checked_size("tp", tp)
        self._cp: int = checked_size("cp", cp)
        self._pp: int = checked_size("pp", pp)
        self._ep: int = checked_size("ep", ep)
        self._schedule = Schedule.of(schedule, pp, stages_per_rank, microbatches)
        if pp == 1 and (microbatches is not None or stages_per_rank is not None or schedule != "1F1B"):
            raise ConflictError(
                "schedule, stages_per_rank and microbatches are those of a pipeline: give pp=2 or more, or leave them "
                "out"
            )
        if pp > 1 and state_dict_type != "sharded":
            raise ConflictError(
                f"state_dict_type={state_dict_type!r} would leave all layers on each rank, and pp={pp} divides them: "
                "leave it out, and load a checkpoint of the run"
            )
        self._context_parallel = checked_method(context_parallel)
        if cp == 1 and context_parallel != "ulysses":
            raise ConflictError(
                f"context_parallel={context_parallel!r} is for divided sequences: give cp=2 or more, or leave it out"
            )
        self._pipeline: PipelineRun | None = None
        self._goes_on = False  # with the layers of an earlier run
        self._random_numbers: LayerRandomNumbers | None = None
        self._sequences: Sequences | None = None
        self._experts: ExpertParallelism | None = None
        self._defers_reduction = self._begins_step = False
        if not isinstance(reshard_after_forward, bool | None):
            raise RequestError(f"reshard_after_forward={reshard_after_forward!r} is not True, False or None")
        self._cpu_offload = cpu_offload
        self._mixed_precision = mixed_precision
        self._auto_wrap_policy = checked_policy("auto_wrap_policy", auto_wrap_policy, or_size=True)
        self.saved_activations = memory = ActivationMemory.of(
            activation_checkpointing, activation_checkpointing_policy, activation_offload
        )
        self._recomputes = memory is not None and memory.recomputation == "full"
        self._reshard_after_forward = pp == 1 if reshard_after_forward is None else reshard_after_forward
        self._state_dict_type = state_dict_type_name(state_dict_type)
        if self._schedule.splits_backward:
            self._check_split_backward(reshard_after_forward)

    def _check_split_backward(self, reshard_after_forward: bool | None) -> None:
        schedule = f"schedule={self._schedule.name!r}"
        if self.saved_activations is not None:
            raise ConflictError(
                f"{schedule} reads saved activations in two passes, and activation_checkpointing and "
                "activation_offload would compute or copy them in each: leave them out, or choose 'Interleaved1F1B' or "
                "'1F1B'"
            )
        if reshard_after_forward:
            raise ConflictError(
                f"{schedule} computes gradients of weights long after the backward pass of their layers, so that these "
                "stay gathered for a batch: leave reshard_after_forward=True out, or choose 'Interleaved1F1B' or '1F1B'"
            )

    # The mesh

    @override
    def setup_environment(self) -> None:
        backend = self.process_group_backend or self.accelerator.process_group_backend
        if backend == "gloo" and self.root_device.type != "cpu" and (self._pp > 1 or self._context_parallel == "ring"):
            option = f"pp={self._pp}" if self._pp > 1 else "context_parallel='ring'"
            raise ConflictError(
                f"{option} sends tensors from rank to rank, which gloo does from the memory of the host only, and they "
                f"are on {self.root_device}: leave process_group_backend='gloo' out"
            )
        super().setup_environment()

    @override
    def describe_layout(self, world_size: int, ranks_per_machine: int) -> Sequence[tuple[str, str, str]]:
        rows = self._axes_of(world_size).rows(ranks_per_machine)
        if self._cp > 1:
            rows.append(("  attention", self._context_parallel, METHODS[self._context_parallel]))
        if self._pp > 1:
            rows.append(
                ("  schedule", str(self._schedule), f"idle {self._schedule.bubble:.0%} of the time: the bubble")
            )
        return rows

    def _axes_of(self, world_size: int) -> Axes:
        return Axes.of(
            world_size,
            pp=self._pp,
            dp_replicate=self._dp_replicate,
            dp_shard=self._dp_shard,
            cp=self._cp,
            tp=self._tp,
            ep=self._ep,
        )

    @property
    def axes(self) -> Axes:
        """The sizes of the mesh, in each rank."""
        return self._axes_of(self.world_size)

    @property
    def data_parallel_size(self) -> int:
        """Number of groups of ranks that read different batches."""
        axes = self.axes
        return axes.dp_replicate * axes.dp_shard

    @property
    def tensor_parallel_size(self) -> int:
        """Number of ranks over which layers are split."""
        return self._tp

    @property
    def expert_parallel_size(self) -> int:
        """Number of ranks over which experts are divided."""
        return self._ep

    @property
    def _num_data_groups(self) -> int:
        return self.data_parallel_size * self._cp

    def _open_mesh(self) -> DeviceMesh:
        mesh = self.axes.mesh
        return open_mesh(self.root_device.type, tuple(mesh.values()), tuple(mesh), self.timeout)

    @property
    def _tensor_mesh(self) -> DeviceMesh:
        return self.device_mesh[TENSOR]

    def _data_groups(self) -> list[dist.ProcessGroup]:
        return [self.device_mesh.get_group(name) for name in (REPLICATE, SHARD)]

    def _value_groups(self) -> list[dist.ProcessGroup]:
        return [*self._data_groups(), self.device_mesh.get_group(PIPELINE)]

    def _batch_groups(self) -> list[dist.ProcessGroup]:
        axes = {TENSOR: self._tp, PIPELINE: self._pp}
        groups = [self.device_mesh.get_group(name) for name, size in axes.items() if size > 1]
        return groups if self._sequences is None else [*groups, self._sequences.group]

    # Sharding

    def _sharding(self) -> Sharding:
        # torch replicates over the first dimension of a mesh with two.
        names = (SHARD,) if self.axes.dp_replicate == 1 else (REPLICATE, SHARD)
        experts = self._experts
        return self._sharding_over(
            self.device_mesh[names],
            tensor_mesh=self._tensor_mesh if self.tensor_parallel_size > 1 else None,
            meshes={} if experts is None else dict.fromkeys(experts.layers, experts.sharding_mesh),
            reshard_after_forward=self._reshard_after_forward,
        )

    def _blocks(self) -> Sequence[Module]:
        self._check_split(
            f'tp={self._tp}: call parallelize_module(..., self.device_mesh["tp"], ...) in configure_model, or leave '
            "tp out"
        )
        layers = self.module
        if self._pp > 1:
            self._pipeline = PipelineRun(
                self.module,
                self.device_mesh,
                self.axes,
                self._schedule,
                self.root_device,
                self.timeout,
                loss_dtype=torch.float64 if self.precision_plugin.compute_dtype is torch.float64 else torch.float32,
                passes_communicate=self.axes.dp_shard > 1 and (self._reshard_after_forward or self._ep > 1),
            )
            layers = self._pipeline.layers
            self._check_earlier_run(layers)
        blocks = blocks_of(layers, self._auto_wrap_policy, root=self.module)
        return blocks if self._experts is None else with_experts(self._experts.layers, layers, blocks)

    def _check_earlier_run(self, layers: Module) -> None:
        """Note whether there was an earlier run; raise MisuseError on all ranks if one cannot go on with its layers."""
        problem: MisuseError | None = None
        try:
            check_stages(self.module, layers)
        except MisuseError as error:
            problem = error
        if self.reduce_boolean_decision(problem is not None, all=False):
            raise problem or MisuseError(
                f"other ranks cannot go on with the layers of an earlier run of {type(self.module).__name__}: create a "
                "new module and load a checkpoint"
            )
        self._goes_on = self.reduce_boolean_decision(is_parked(self.module), all=False)

    def _take_first_values(self, module: Module) -> None:
        if self._pipeline is not None and self._goes_on:
            # Now, as none of the ranks has failed: at the end of a run one might have, and the others would wait.
            internals.move(module.buffers(), self.root_device)
            self._pipeline.share_buffers()
        super()._take_first_values(module)

    def _divide_layers(self) -> tuple[Module, set[Module]]:
        layers, foreign = super()._divide_layers()
        if self._pipeline is not None:
            layers, foreign = self._pipeline.layers, self._pipeline.free_other_ranks()
        if self._experts is not None:
            self._experts.divide(layers)
        return layers, foreign

    @property
    def _rank_layout(self) -> dict[str, Any]:
        return {**super()._rank_layout, "ep": self._ep, "stages": self._schedule.num_stages}

    @property
    def _is_reusable(self) -> bool:
        return super()._is_reusable and self._ep == 1  # experts hold the mesh of their run

    @classmethod
    def layout_options(cls, module: Module, world_size: int, ranks_per_machine: int) -> Sequence[Mapping[str, Any]]:
        meshes = layouts(world_size, ranks_per_machine, num_experts=common_number_of_experts(module))
        num_layers = number_of_layers(module)
        compared = [options for axes in meshes for options in axes.schedules(num_layers)]
        # Offload is for state of which not even a shard over all ranks fits.
        sharded = [axes for axes in meshes if axes.dp_replicate == axes.pp == axes.ep == 1]
        return [
            *compared,
            *({**options, "activation_checkpointing": "full"} for options in compared),
            *({**axes.options, "cpu_offload": True} for axes in sharded),
        ]

    @classmethod
    def similar_options(cls, options: Mapping[str, Any], module: Module) -> Sequence[Mapping[str, Any]]:
        """Return those of the same mesh with other schedules of a pipeline."""
        return similar_schedules(options, number_of_layers(module))

    def check_training(self, training: TrainingSize) -> None:
        axes = self._axes_of(training.world_size)
        if axes.mesh[SHARD] * axes.tp > 1:  # otherwise each rank has whole matrices
            super().check_training(training)
        module, name = training.module, type(training.module).__name__
        if self._pp > 1:
            check_estimated_module(module)
            estimated_stages(module, self._pp, self._schedule.stages_per_rank)
            count, size = self._schedule.microbatches, training.batch_size
            if size < count:
                raise RequestError(
                    f"a batch of {size} samples cannot be divided into {count} microbatches: give batches of {count} "
                    "samples or more, or fewer microbatches"
                )
        if self._tp > 1:
            axes_of_mesh = PIPELINE, REPLICATE, SHARD, CONTEXT, TENSOR
            check_splits_layers(training, "tp", axes_of_mesh, self._tp, divides_experts=self._ep > 1)
        if self._cp > 1 and not training.heads:
            raise MisuseError(
                f"{name} does not call torch's attention, whose sequences cp divides, or asks it for its weights"
            )
        if self._cp > 1 and training.batch_shapes:
            check_sequences(module, training.batch_shapes, self._cp, self._context_parallel)
        if self._ep > 1:
            experts_of(module, self._ep)
        self._check_heads(name, training.heads)

    def _check_heads(self, name: str, heads: Iterable[int]) -> None:
        divisors = {TENSOR: self._tp, CONTEXT: self._cp if self._context_parallel == "ulysses" else 1}
        product = " * ".join(f"{axis}={size}" for axis, size in divisors.items() if size > 1)
        for count in heads:
            if count % math.prod(divisors.values()):
                ring = ", or context_parallel='ring'" if count % self._tp == 0 else ""
                raise RequestError(f"{product} does not divide the {count} heads of {name}: choose smaller sizes{ring}")

    def stages(self, training: TrainingSize) -> Sequence[Stage]:
        return self._estimate(training).stages() if self._pp > 1 else ()

    def memory_layout(self, training: TrainingSize) -> MemoryLayout | None:
        """Return the memory of a rank if each matrix is split over ``tp``, and ``pp`` divides layers evenly.

        With ``ep``, all experts get as many tokens.
        """
        return self._estimate(training).memory_layout()

    def communication_layout(self, training: TrainingSize) -> CommunicationLayout | None:
        """Return what a rank sends along each axis, if all experts get as many tokens."""
        return self._estimate(training).communication_layout()

    def _estimate(self, training: TrainingSize) -> MeshEstimate:
        return MeshEstimate(
            training=training,
            axes=self._axes_of(training.world_size),
            schedule=self._schedule,
            blocks=estimated_blocks(training.module, self._auto_wrap_policy),
            experts=tuple(experts_of(training.module, self._ep)) if self._ep > 1 else (),
            policy=precision_policy(self._mixed_precision, training.precision),
            frees_blocks=self._reshard_after_forward,
            offloads=offloads_to_host(self._cpu_offload, training.device_type),
            attention=self._context_parallel,
            recomputes=self._recomputes,
        )

    # Pipeline

    def compiled_steps(self) -> CompiledSteps | None:
        return CompiledSteps(optimizer_steps=0) if self._pp > 1 else None

    def setup(self, trainer: TrainerLike) -> None:
        self._random_numbers = None
        if self._pp > 1 and trainer.is_fitting:
            check_backward(self.module, self.module_backward)
        super().setup(trainer)

    @override
    def setup_optimizers(self, trainer: TrainerLike) -> None:
        super().setup_optimizers(trainer)
        if self._pp > 1:
            for optimizer in self.optimizers:
                check_steps_stages(optimizer, self._pp)

    def rank_state(self) -> dict[str, Any]:
        numbers = self._random_numbers
        return {**super().rank_state(), "layer_random": None if numbers is None else numbers.states}

    def load_rank_state(self, state: Mapping[str, Any]) -> None:
        super().load_rank_state(state)
        saved = state.get("layer_random")
        # In another layout, other ranks draw the same numbers.
        if saved is not None and self.takes_gradients(state):
            self._random_numbers = LayerRandomNumbers(self, saved)

    def wrap_model(self, trainer: TrainerLike) -> None:
        if self._pp > 1:
            check_pipeline(self.module, trainer)
        if self._cp > 1:
            with new_connections():
                group, _ = dist.new_subgroups_by_enumeration(self.axes.groups(CONTEXT), timeout=self.timeout)
            self._sequences = Sequences(self.module, group, self._context_parallel)
        if self._ep > 1:
            group = self.device_mesh.get_group(TENSOR) if self._tp > 1 else None
            self._experts = ExpertParallelism(self.module, self.axes, group, self)
        super().wrap_model(trainer)
        if self._pipeline is not None:
            self.precision_plugin.peers_have_gradients = True
            self._pipeline.start(self._train_stage, self._evaluate_stage, log=self.is_global_zero)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's ``training_step``, or the forward and backward passes of a pipeline."""
        if self._pipeline is None:
            return super().training_step(*args, **kwargs)
        self._pipeline.check_messages()  # before a comparison of batches, which are messages too
        sharded = self._sharded_module
        self._begins_step = True
        values = args[:1] if self.step_methods is None else _batch_of_function(*args, **kwargs)
        batch = values[0] if len(values) == 1 else values
        self.check_same_batch("training_step", batch)
        if self._sequences is not None:
            batch = self._sequences.cut_batch(batch)

        def before_backward(is_last: bool, is_awaited: bool) -> None:
            sharded.begin_backward()
            # On CPU a collective ends before the backward pass goes on: it would delay the ranks before this one.  They
            # have passes to do after this rank's last one, and its collectives have that time.
            sharded.set_gradient_sync(is_last and not is_awaited and not self._defers_reduction)
            if not self._reshard_after_forward:
                sharded.set_free_after_backward(is_last)

        earlier = [] if self._defers_reduction else self._pipeline.take_shared_gradients()
        with self._attending("training_step"):
            outputs = self._pipeline.train(
                batch,
                self.precision_plugin.scale_loss,
                before_backward,
                sharded.accumulate_gradients,
                self._weigh,
                self._capture_logs,
            )
        sharded.set_gradient_sync(not self._defers_reduction)
        if not self._defers_reduction:
            sharded.set_free_after_backward(True)
            sharded.reduce_gradients()
        sharded.end_backward()
        sharded.free()  # also the layers of a frozen stage, which no backward pass has freed
        if not self._defers_reduction:
            self._pipeline.sum_shared_gradients(earlier)
        return outputs

    def _capture_logs(self) -> AbstractContextManager[Sequence[Any]]:
        # In a hand-written loop log does nothing.
        capture: Any = None if self.step_methods is not None else getattr(self.module, "capture_logs", None)
        return nullcontext(()) if capture is None else capture()

    def _weigh(self, weight: Tensor) -> Tensor:
        # Without a caller that weighs, such as in a test: batches count alike.
        return torch.ones_like(weight) if self.weigh_batch is None else self.weigh_batch(weight)

    def _train_stage(self, compute: Callable[..., Any], *args: Any) -> Any:
        sharded = self._sharded_module
        run = sharded.train if self._begins_step else sharded.run
        self._begins_step = False
        with self.precision_plugin.forward_context(), self._drawing_in_layers():
            return run(compute, *args)

    def _evaluate_stage(self, compute: Callable[..., Any], *args: Any) -> Any:
        with self._drawing_in_layers():
            return self._sharded_module.evaluate(compute, *args)

    def _drawing_in_layers(self) -> AbstractContextManager[None]:
        """Return a context for the layers of this rank, if it has others than the ranks of its batch."""
        if self._pp == self._ep == 1:
            return nullcontext()
        if self._random_numbers is None:
            stage = int(self.device_mesh[PIPELINE].get_local_rank())
            self._random_numbers = LayerRandomNumbers.of_stage(self, stage)
        return self._random_numbers.drawing()

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Compute gradients; the training step of a pipeline has done so."""
        if self._pipeline is None:
            # Layers may compute their activations again.
            with nullcontext() if self._sequences is None else self._sequences.attention.replacing():
                super().backward(loss, *args, **kwargs)

    @contextmanager
    def no_backward_sync(self) -> Iterator[None]:
        """Accumulate unsharded gradients without communication, until a backward pass outside of the context."""
        self._defers_reduction = True
        try:
            with super().no_backward_sync():
                yield
        finally:
            self._defers_reduction = False

    def _attending(self, name: StepName) -> AbstractContextManager[None]:
        if self._sequences is None:
            return nullcontext()
        return self._sequences.attending(name, lambda attended: self.reduce_boolean_decision(attended, all=False))

    def run_step(self, name: StepName, step: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        sequences = self._sequences
        if self._pipeline is not None:
            self._pipeline.check_messages()
        if args or kwargs:
            self.check_same_batch(name, (args, kwargs))
        if sequences is None or not args:  # without a batch, as where each rank generates the same text
            return self._run_stages(name, step, *args, **kwargs)
        if self.step_methods is None:
            args = (sequences.cut_batch(args[0]), *args[1:])
        else:
            args = (args[0], *sequences.cut_arguments(_batch_of_function(*args, **kwargs)))
        with self._attending(name):
            outputs = self._run_stages(name, step, *args, **kwargs)
        return sequences.join_outputs(name, outputs)

    def join_sequences(self, tensor: Tensor) -> Tensor:
        """Return the whole sequences of a tensor of which ranks of ``cp`` have parts; collective over them.

        It is collective again in a backward pass, where the gradients of a part are the sum of those of all ranks.

        Args:
            tensor: This rank's part, whose second dimension is the sequence.
        """
        return tensor if self._sequences is None else self._sequences.join(tensor)

    def _check_same_values(self, values: Tensor) -> None:
        if self._cp == 1:
            return
        # It waits for the device: without it, values of the first tokens would be taken for those of whole samples.
        if not torch.isclose(values, values[:, :1], equal_nan=True).all():
            raise MisuseError(
                f"all_gather got other values on the {self._cp} ranks of cp, which share each batch: those of the "
                "tokens of a rank, or of the rank itself. Pass strategy.join_sequences(tensor) for a tensor with a "
                "value for each token, compute values of samples from joined ones, take strategy.reduce for means, or "
                "pass group=torch.distributed.group.WORLD for a value of each rank"
            )

    def _run_stages(self, name: StepName, step: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if name == "training_step":
            with self._drawing_in_layers():
                return super().run_step(name, step, *args, **kwargs)
        if self._pipeline is None:
            return super().run_step(name, step, *args, **kwargs)
        # The step calls the pipeline's model, in which each stage gathers its own layers.
        with self.precision_plugin.forward_context(), self._pipeline.evaluating():
            return step(*args, **kwargs)

    def clip_gradients(self, optimizer: Optimizer, clip_val: float, algorithm: ClipAlgorithm = "norm") -> Tensor | None:
        """Clip the gradients of an optimizer's parameters in place, by their norm over all ranks, or by value."""
        if self._pipeline is None or algorithm == "value":
            return super().clip_gradients(optimizer, clip_val, algorithm)
        self.unscale_gradients(optimizer)
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        group = self.device_mesh.get_group(PIPELINE)
        device = next(parameter.device for parameter in self.module.parameters() if not parameter.is_meta)
        return clip_by_norm(parameters, clip_val, group, self._pipeline.counted_elsewhere, device)

    def share_gradient_norms(self, norms: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the norms of the gradients of all stages by name, 0 for a parameter without a gradient; collective."""
        if self._pipeline is None:
            return super().share_gradient_norms(norms)
        parameters = {name: value for name, value in self.module.named_parameters() if value.requires_grad}
        dtype = functools.reduce(torch.promote_types, (value.dtype for value in parameters.values()), torch.float32)
        summed = torch.zeros(len(parameters), dtype=dtype, device=self.root_device)
        elsewhere = self._pipeline.counted_elsewhere
        for number, (name, parameter) in enumerate(parameters.items()):
            if name in norms and id(parameter) not in elsewhere:
                summed[number] = norms[name]
        dist.all_reduce(summed, group=self.device_mesh.get_group(PIPELINE))
        return dict(zip(parameters, summed.unbind(), strict=True))

    def _end_sharding(self) -> None:
        if self._pipeline is not None:
            self._restore_activations()  # the outer one of two replaced forwards first
            self._pipeline.end(failed=self._failed)
            self._pipeline = None
        self._sequences = None
        super()._end_sharding()
        if self._experts is not None:
            self._restore_activations()  # the outer one of two replaced forwards first
            self._experts.end()
            self._experts = None

    # State

    def _share_buffers(self) -> None:
        if self._pipeline is not None:
            self._pipeline.share_buffers()


def _batch_of_function(_function: Any, /, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """Return the batch in the arguments of ``compute`` of a hand-written loop."""
    if kwargs or not args:
        received = ", ".join(f"{name}=" for name in kwargs) or "no batch"
        raise MisuseError(
            f"compute got {received}, and the mesh divides its batch, which are the positional arguments after the "
            "function: call loop.compute(function, tokens, labels)"
        )
    return args
