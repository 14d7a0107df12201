"""DDPStrategy: torch's DistributedDataParallel, one process per device."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import math
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.nn import Embedding, EmbeddingBag
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from dstrat.errors import ConflictError, MisuseError, RequestError
from dstrat.interfaces.communication import Collective, CommunicationLayout
from dstrat.parallel.activation_memory import ActivationMemory
from dstrat.parallel.collectives import give_plain_strides, stored_elements
from dstrat.parallel.optimizer_checks import check_layout
from dstrat.parallel.process_group import DEFAULT_TIMEOUT
from dstrat.parallel.separate_modules import SeparateModules
from dstrat.parallel.strategy import ParallelStrategy
from dstrat.plugins.settings import nearest
from dstrat_ddp import reducer
from dstrat_ddp.comm_hooks import ParameterAveraging, check_averaging_period, comm_hook
from dstrat_ddp.step_module import (
    ExpectedBackward,
    ExplainedUnusedParameters,
    SeparateWrappers,
    WatchedSteps,
    unused_parameters_text,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
    from datetime import timedelta

    import torch
    from torch import Tensor
    from torch.nn import Module, Parameter
    from torch.optim import Optimizer

    from dstrat.interfaces.accelerator import Accelerator
    from dstrat.interfaces.checkpoint_io import CheckpointIO
    from dstrat.interfaces.cluster import ClusterEnvironment
    from dstrat.interfaces.memory import MemoryLayout, TrainingSize
    from dstrat.interfaces.precision import Precision
    from dstrat.interfaces.strategy import TrainerLike
    from dstrat.parallel.layers import LayerClasses, LayerPolicy
    from dstrat_ddp.comm_hooks import Hook


_logger = logging.getLogger(__name__)

_FIRST_BUCKET, _BUCKET_MB = 2**20, 25  # of DistributedDataParallel


class DDPStrategy(ParallelStrategy):
    """Training with torch's DistributedDataParallel, on one or several machines.

    Each device has a process with a replica of the module; gradients are averaged while the backward pass is still
    computing.  To wrap in another class, override :meth:`configure_ddp`::

        class CustomDDPStrategy(DDPStrategy):
            def configure_ddp(self):
                self.model = MyCustomDistributedDataParallel(self.model, device_ids=self.device_ids)

    Args:
        accelerator: The hardware.
        parallel_devices: The devices of this machine, one for each local rank.
        cluster_environment: The cluster that the job runs on.
        checkpoint_io: The format of checkpoints.
        precision_plugin: The dtypes.
        process_group_backend: Backend of torch.distributed; None takes the accelerator's.
        timeout: How long a rank waits for the others before the job fails.
        start_method: ``"popen"`` (re-run the script), ``"spawn"``, ``"fork"`` or ``"forkserver"``.
        ddp_comm_state: State of the communication hook.
        ddp_comm_hook: Hook that averages the gradients, or a name such as ``"fp16_compress"``, ``"bf16_compress"``,
            ``"powerSGD"`` or ``"post_localSGD"``.
        ddp_comm_wrapper: Wrapper that compresses the hook's communication, ``"fp16_compress"`` or ``"bf16_compress"``.
        model_averaging_period: With ``post_localSGD``, the optimizer steps between two averagings of parameters.
        activation_checkpointing: What is not saved for the backward pass, and computed again: ``"full"`` or
            ``"selective"`` for repeated layers, or classes of layers.
        activation_checkpointing_policy: The layers, as classes or a function of a module.
        activation_offload: Whether repeated layers save their activations on the host; True, or the layers.
        **kwargs: Passed to DistributedDataParallel, such as ``find_unused_parameters``, ``static_graph``,
            ``gradient_as_bucket_view`` and ``bucket_cap_mb``.

    Raises:
        MisuseError: DistributedDataParallel has no such keyword.
        RequestError: No communication hook has that name.
        ConflictError: An argument of the communication needs another one.
    """

    compares_replicas = True
    is_elastic = True

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: Sequence[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        ddp_comm_state: Any = None,
        ddp_comm_hook: Hook | str | None = None,
        ddp_comm_wrapper: Callable[[Hook], Hook] | str | None = None,
        model_averaging_period: int | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = DEFAULT_TIMEOUT,
        start_method: str = "popen",
        *,
        activation_checkpointing: LayerClasses | str | None = None,
        activation_checkpointing_policy: LayerPolicy | None = None,
        activation_offload: bool | LayerPolicy = False,
        **kwargs: Any,
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
        check_ddp_keywords(kwargs, type(self))
        self.saved_activations = ActivationMemory.of(
            activation_checkpointing, activation_checkpointing_policy, activation_offload
        )
        self._ddp_kwargs = kwargs
        self._comm_hook = comm_hook(ddp_comm_hook, ddp_comm_state, ddp_comm_wrapper)
        check_averaging_period(model_averaging_period, self._comm_hook)
        if self._comm_hook is not None and self._comm_hook.is_noop:
            self.compares_replicas = False
        self._model_averaging_period = model_averaging_period
        self.trains_apart = model_averaging_period is not None
        self._averaging: ParameterAveraging | None = None
        self._expected_backward: ExpectedBackward | None = None
        self._explained: AbstractContextManager[Any] = nullcontext()
        self._has_run_backward = False
        self._frozen: list[Parameter] = []

    @override
    def check_elastic(self) -> None:
        super().check_elastic()
        if self._comm_hook is not None and (self._comm_hook.state is not None or self._model_averaging_period):
            raise ConflictError(
                f"elastic goes on with another process group, and the ddp_comm_state of {type(self).__name__} "
                "keeps the first one: leave one of them out"
            )

    # Wrapping

    @property
    def device_ids(self) -> list[int] | None:
        """Index of the device in a list, for DistributedDataParallel; None where a process has no choice of devices.

        That is on the CPU, and on hardware that shows each process a single device, as the parameters name it.
        """
        has_choice = self.root_device.type != "cpu" and self.accelerator.devices_share_process
        return [self.root_device.index] if has_choice else None

    @property
    def processes_per_machine(self) -> int:
        """Number of ranks on this machine, and on each other one."""
        return len(self.parallel_devices)

    @classmethod
    def layout_options(cls, module: Module, world_size: int, ranks_per_machine: int) -> Sequence[Mapping[str, Any]]:  # noqa: ARG003 - the same for all
        return ({}, {"activation_checkpointing": "full"})

    @override
    def check_training(self, training: TrainingSize) -> None:
        finds_unused = any(self._ddp_kwargs.get(name) for name in ("find_unused_parameters", "static_graph"))
        if training.unused and not finds_unused:
            raise RequestError(unused_parameters_text(training.unused))

    def memory_layout(self, training: TrainingSize) -> MemoryLayout | None:
        layout, buckets = training.replicated, training.trainable_parameters
        if self._ddp_kwargs.get("gradient_as_bucket_view"):
            # Gradients are views of the buckets, also those of earlier batches.
            return dataclasses.replace(layout, gradients=0, accumulated=0, buffers=buckets)
        return dataclasses.replace(layout, buffers=buckets)

    def communication_layout(self, training: TrainingSize) -> CommunicationLayout | None:
        share = 1.0 if self._comm_hook is None else self._comm_hook.sent_share(training.precision.param_dtype)
        if share is None:
            return None
        bucket = float(self._ddp_kwargs.get("bucket_cap_mb") or _BUCKET_MB) * 2**20
        gradients = Collective(
            kind="all_reduce",
            bytes=int(share * training.trainable_parameters),
            messages=1 + math.ceil(max(0, training.trainable_parameters - _FIRST_BUCKET) / bucket),
            ranks=training.world_size,
            overlaps=True,
        )
        buffers = Collective(
            kind="broadcast",
            bytes=training.module_buffers if self._broadcasts_buffers else 0,
            messages=1,
            ranks=training.world_size,
        )
        # Gradients are scaled as they are copied into buckets, and copied back unless they are views of these.
        is_view = self._ddp_kwargs.get("gradient_as_bucket_view")
        return CommunicationLayout(
            collectives=(gradients, buffers) if buffers.bytes else (gradients,),
            copied=(2 if is_view else 4) * training.trainable_parameters,
        )

    def wrap_model(self, trainer: TrainerLike) -> None:
        if trainer.is_fitting:
            if self.world_size > 1:
                _check_embeddings(self.module)
            self._wrap()
        else:  # the values of global rank 0, which DistributedDataParallel broadcasts too
            self.broadcast_tensors(self._synchronized(self.module.named_parameters()))
            self.broadcast_tensors(self._synchronized(self.module.named_buffers()))

    def setup_optimizers(self, trainer: TrainerLike) -> None:
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            if _is_sharded(optimizer):
                check_layout(optimizer.optim)  # type: ignore[attr-defined]  # of the ZeroRedundancyOptimizer

    def evaluation_context(self) -> AbstractContextManager[Any]:
        # The last step has changed buffers by the data of each process, such as the statistics of batch norm.
        # DistributedDataParallel broadcasts them before the next step, and a checkpoint has those of rank 0.
        if self._broadcasts_buffers:
            self.broadcast_tensors(self._synchronized(self.module.named_buffers()))
        return super().evaluation_context()

    @property
    def _broadcasts_buffers(self) -> bool:
        # torch 2.13 has the first name, and deprecates the second, the only one of 2.9.
        switches = (self._ddp_kwargs.get(name) for name in ("forward_sync_buffers", "broadcast_buffers"))
        return bool(next((is_on for is_on in switches if is_on is not None), True))

    def _synchronized(self, tensors: Iterable[tuple[str, Tensor]]) -> list[Tensor]:
        """Return the tensors that are the same on all ranks, without those that the user has excluded."""
        ignored = reducer.ignored_names(self.module)
        return [tensor for name, tensor in tensors if name not in ignored]

    def _wrap(self) -> None:
        self._frozen = [parameter for parameter in self.module.parameters() if not parameter.requires_grad]
        if len(self._frozen) == len(list(self.module.parameters())):
            _logger.info(
                "%s has no trainable parameter, so that there is nothing to average", type(self.module).__name__
            )
            return
        for buffer in self._synchronized(self.module.named_buffers()):
            if stored_elements(buffer).shape != buffer.shape:  # torch's broadcast before each step fails
                give_plain_strides(buffer)
        if isinstance(self.module, SeparateModules):
            self.model = SeparateWrappers(self.module, self._wrap_one)
            return
        steps = WatchedSteps(self.module)
        self._wrap_one(steps)
        if isinstance(self.model, DistributedDataParallel):
            self._expected_backward = ExpectedBackward(self.model, steps.watch)
            self._explained = ExplainedUnusedParameters(self.model)

    def _wrap_one(self, steps: Module) -> Any:
        """Wrap a module whose forward runs a step, and return the wrapper."""
        self.model = steps
        self.configure_ddp()
        if isinstance(self.model, DistributedDataParallel):
            reducer.lay_out_buckets(self.model)  # before a communication hook could see its gradients of zero
        self._configure_communication()
        return self.model

    def configure_ddp(self) -> None:
        """Replace :attr:`model`, a module whose forward runs a step, by a wrapper that averages its gradients."""
        self.model = DistributedDataParallel(self.model, device_ids=self.device_ids, **self._ddp_kwargs)

    def _configure_communication(self) -> None:
        if self._comm_hook is None:
            return
        # First, as it may open the subgroup of the hook's state, which several models copy.
        if self._model_averaging_period is not None and self._averaging is None:
            self._averaging = ParameterAveraging(
                self._model_averaging_period, self._comm_hook.state, self.processes_per_machine
            )
        several = isinstance(self.module, SeparateModules)
        self._comm_hook.register(self.model, self.root_device, is_one_of_several=several)

    # Steps: only training goes through the wrapper, whose forward waits for the other ranks

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._frozen and any(parameter.requires_grad for parameter in self._frozen):
            _logger.info(
                "%s has more trainable parameters than before, and is wrapped again", type(self.module).__name__
            )
            # A wrapper averages gradients of the parameters that were trainable when it was created.
            self._unwrap()
            self._wrap()
        if self.model is self._module:  # nothing is trainable
            return super().training_step(*args, **kwargs)
        step = partial(self.model, self.module_step("training_step"))
        with self._explanation():
            output = self.run_step("training_step", step, *args, **kwargs)
        if self._expected_backward is not None:
            self._expected_backward.after_forward()
        return output

    def _explanation(self) -> AbstractContextManager[Any]:
        return self.model.explained() if isinstance(self.model, SeparateWrappers) else self._explained

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        if isinstance(self.model, SeparateWrappers):
            self.model.before_backward(loss)
            with self.model.explained():
                super().backward(loss, *args, **kwargs)
                self.model.check_finished()
            return
        if self._expected_backward is None:
            super().backward(loss, *args, **kwargs)
            return
        self._expected_backward.before_backward(loss)
        with self._explained:
            super().backward(loss, *args, **kwargs)
            reducer.check_reduction_finished(self.model)
        self._has_run_backward = True

    def no_backward_sync(self) -> AbstractContextManager[Any]:
        """Return a context in which gradients accumulate without being averaged; it must span forward and backward.

        With ``static_graph`` the first backward pass is averaged nevertheless, because torch records the graph then;
        the sum of gradients is right.
        """
        if getattr(self.model, "static_graph", False) and not self._has_run_backward:
            return nullcontext()
        no_sync: Callable[[], AbstractContextManager[Any]] = getattr(self.model, "no_sync", nullcontext)
        return no_sync()

    @property
    def weighs_losses(self) -> bool:
        return self._averaging is None  # local SGD averages parameters

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Module | None = None, **kwargs: Any
    ) -> Any:
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        if self._averaging is not None:
            self._averaging.after_step(optimizer)
        return output

    @override
    def replicated_parameters(self) -> dict[str, Tensor]:
        ignored = reducer.ignored_names(self.module)
        return {name: one for name, one in super().replicated_parameters().items() if name not in ignored}

    def finish_training(self) -> None:
        super().finish_training()
        if self._averaging is not None:
            self._averaging.average_now(parameter for parameter in self.module.parameters() if parameter.requires_grad)

    # State

    def local_weights(self) -> dict[str, Any]:
        if self._averaging is not None:
            raise ConflictError(
                "ddp_comm_hook 'post_localSGD' lets each rank train weights of its own between two averagings; "
                'strategy="diloco(outer_lr=1.0, outer_momentum=0.0)" averages as often, and has their mean'
            )
        return super().local_weights()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        if self._comm_hook is not None and self._comm_hook.has_state and self.is_global_zero:
            weights = " and its ranks from the weights of global rank 0" if self._averaging is not None else ""
            _logger.warning("ddp_comm_state, which checkpoints do not have, resumes as in a new training%s", weights)

    def sharded_optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return the state of an optimizer by the names of its parameters; collective.

        That of ``ZeroRedundancyOptimizer`` and its like is on global rank 0, which gathers it; other ranks have none.
        """
        if _is_sharded(optimizer):
            optimizer.consolidate_state_dict(to=0)
            if not self.is_global_zero:
                return {}
        return super().sharded_optimizer_state(optimizer)

    # The end

    def on_exception(self, exception: BaseException) -> None:
        self._end_training()
        super().on_exception(exception)

    def teardown(self) -> None:
        self._end_training()
        super().teardown()

    def _end_training(self) -> None:
        self._unwrap()
        self._frozen = []
        if self._averaging is not None:
            self._averaging.close()
            self._averaging = None

    def _unwrap(self) -> None:
        if isinstance(self.model, DistributedDataParallel):
            reducer.release_reducer(self.model)
        elif isinstance(self.model, SeparateWrappers):
            self.model.release()
        self.model, self._expected_backward = self._module, None
        self._explained, self._has_run_backward = nullcontext(), False


def _check_embeddings(module: Module) -> None:
    """Raise a MisuseError for a trained embedding with ``max_norm``, whose replicas would drift apart."""
    for name, layer in module.named_modules():
        if isinstance(layer, Embedding | EmbeddingBag) and layer.max_norm is not None and layer.weight.requires_grad:
            raise MisuseError(
                f"{name!r} is an {type(layer).__name__} with max_norm={layer.max_norm!r}, which scales its weight in "
                "each forward: each rank would do so for its own batches only, and ranks would train different "
                "weights; leave max_norm out, and scale what the layer returns, or the weight in on_train_batch_end"
            )


def _is_sharded(optimizer: Any) -> bool:
    """Return whether an optimizer is torch's ZeroRedundancyOptimizer, whose import takes a while."""
    return hasattr(optimizer, "consolidate_state_dict")


# Keywords that are passed to DistributedDataParallel


_SET_BY_STRATEGY = ("device_ids", "output_device")


def check_ddp_keywords(keywords: Mapping[str, Any], owner: type) -> None:
    """Raise MisuseError for a keyword that DistributedDataParallel does not have, or that follows from the devices.

    Args:
        keywords: The keywords.
        owner: The strategy's class, whose arguments are suggested too.
    """
    possible = [*inspect.signature(DistributedDataParallel).parameters][1:]
    for name, value in keywords.items():
        if name in _SET_BY_STRATEGY:
            if value is None:  # torch's default, which configuration files list
                continue
            raise MisuseError(f"{owner.__name__} sets {name!r} itself, by parallel_devices or the Trainer's devices")
        if name not in possible:
            raise MisuseError(
                f"{owner.__name__} got {name!r}, which neither it nor torch's DistributedDataParallel knows; "
                f"{_advice(name, possible, inspect.signature(owner).parameters)}"
            )


def _advice(name: str, possible: Collection[str], strategy_arguments: Collection[str]) -> str:
    near = nearest(name, [*possible, *strategy_arguments])
    return f"did you mean {' or '.join(map(repr, near))}?" if near else f"possible are {', '.join(possible)}"


# Spawned processes


class DDPSpawnStrategy(DDPStrategy):
    """DDPStrategy whose processes are started with ``spawn``, unless ``start_method`` says otherwise.

    Module, data and callbacks must be picklable, and the script needs a ``__main__`` guard.

    Args:
        *args: As for DDPStrategy.
        start_method: ``"spawn"``, ``"fork"`` or ``"forkserver"``.
        **kwargs: As for DDPStrategy.
    """

    def __init__(self, *args: Any, start_method: str = "spawn", **kwargs: Any) -> None:
        super().__init__(*args, **{"start_method": start_method, **kwargs})
