"""BaguaStrategy: one process per device, with one of Bagua's algorithms between them."""

from __future__ import annotations

import dataclasses
import inspect
import logging
from collections.abc import Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dstrat.errors import ConflictError, MisuseError, RequestError
from dstrat.interfaces.batch import apply_to_tensors
from dstrat.interfaces.communication import Collective, CommunicationLayout
from dstrat.interfaces.state_dict import (
    canonical_name,
    canonical_parameters,
    check_names,
    load_by_names,
    load_named_state,
    named_state,
)
from dstrat.parallel.process_group import DEFAULT_TIMEOUT
from dstrat.parallel.separate_modules import SeparateModules
from dstrat.parallel.strategy import ParallelStrategy
from dstrat_bagua.algorithm import Algorithm, Replica, check_flag, choose_algorithm
from dstrat_bagua.buckets import GradientExchange, unused_parameters_text
from dstrat_bagua.communication import average_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from datetime import timedelta

    from torch.nn import Module, Parameter
    from torch.optim import Optimizer

    from dstrat.interfaces.accelerator import Accelerator
    from dstrat.interfaces.checkpoint_io import CheckpointIO
    from dstrat.interfaces.cluster import ClusterEnvironment
    from dstrat.interfaces.memory import MemoryLayout, TrainingSize
    from dstrat.interfaces.precision import Precision
    from dstrat.interfaces.strategy import TrainerLike

_logger = logging.getLogger(__name__)


class BaguaStrategy(ParallelStrategy):
    """Training with one of Bagua's algorithms, over torch.distributed.

    Each device has a process with a replica of the module.  The algorithms of gradients exchange these while the
    backward pass is still computing; those of weights let the replicas differ, and average their weights.  Evaluation,
    checkpoints and the end of a training have the average of the weights of all ranks then, and the buffers of global
    rank 0.

    The algorithms are those of Gan et al., BAGUA: Scaling up Distributed Learning with System Relaxations,
    https://arxiv.org/abs/2107.01499.  The library itself is not used.

    Args:
        algorithm: ``"gradient_allreduce"``, ``"bytegrad"``, ``"qadam"``, ``"decentralized"``,
            ``"low_precision_decentralized"``, ``"async"``, or an instance of
            :class:`~dstrat_bagua.algorithm.Algorithm`.
        flatten: Whether gradients become views of the buckets; otherwise exchanged gradients are copied back.
        accelerator: The hardware.
        parallel_devices: The devices of this machine, one for each local rank.
        cluster_environment: Where the job runs.
        checkpoint_io: How checkpoints reach storage.
        precision_plugin: The precision: dtypes, casts, loss scaling.
        process_group_backend: Backend of torch.distributed; None takes the accelerator's.
        timeout: How long a collective waits for the other ranks before the job fails.
        start_method: ``"popen"`` (re-run the script), ``"spawn"``, ``"fork"`` or ``"forkserver"``.
        find_unused_parameters: Whether a step may leave trainable parameters without a gradient; ranks compare then
            which have one.
        **bagua_kwargs: Options of the algorithm, such as ``hierarchical``, ``communication_interval`` or
            ``sync_interval_ms``.

    Attributes:
        algorithm: The algorithm.

    Raises:
        RequestError: No algorithm has this name, or an option has a value that is not possible.
        MisuseError: The algorithm has no such option.
        ConflictError: Options are given beside an instance.
    """

    compares_replicas = True
    allows_new_optimizers = False  # the algorithm has those of the setup

    def __init__(
        self,
        algorithm: str | Algorithm = "gradient_allreduce",
        flatten: bool = True,
        accelerator: Accelerator | None = None,
        parallel_devices: Sequence[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = DEFAULT_TIMEOUT,
        start_method: str = "popen",
        find_unused_parameters: bool = False,
        **bagua_kwargs: Any,
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
        known = [name for name in inspect.signature(type(self)).parameters if name != "bagua_kwargs"]
        self.algorithm = choose_algorithm(algorithm, bagua_kwargs, known)
        self._flatten = check_flag("flatten", flatten)
        self._finds_unused = check_flag("find_unused_parameters", find_unused_parameters)
        self._replica: Replica | None = None
        self._gradients: GradientExchange | None = None
        self._frozen: list[tuple[str, Parameter]] = []
        self._is_accumulating = False
        self._has_gradients = False
        self._loads_rank_state = True
        self._set_differing(self.algorithm.replicas_differ)

    def _set_differing(self, differs: bool) -> None:
        # One process alone cannot write the average, nor another one's gradients.
        self.replicates_state = not differs
        self.saves_gradients = self.trains_apart = differs

    @property
    def _differs(self) -> bool:
        return self._replica is not None and not self.replicates_state

    def check_training(self, training: TrainingSize) -> None:
        exchanges_gradients = not self.algorithm.replicas_differ
        if training.unused and exchanges_gradients and not self._finds_unused:
            raise RequestError(unused_parameters_text(training.unused))

    def memory_layout(self, training: TrainingSize) -> MemoryLayout | None:
        layout, weights = training.replicated, training.trainable_parameters
        if self.algorithm.replicas_differ:
            return dataclasses.replace(layout, buffers=self.algorithm.weight_copies * weights)
        gradients = 0 if self._flatten else layout.gradients  # views of the buckets
        return dataclasses.replace(layout, gradients=gradients, buffers=weights)

    def communication_layout(self, training: TrainingSize) -> CommunicationLayout | None:
        collectives = self.algorithm.sent_gradients(training)
        if collectives is None:
            return None
        if training.module_buffers:  # those of global rank 0
            buffers = Collective(kind="broadcast", bytes=training.module_buffers, messages=1, ranks=training.world_size)
            collectives = (*collectives, buffers)
        copies = 2 if self._flatten else 6  # scaled in the bucket, and copied into it and back unless they are views
        return CommunicationLayout(collectives=collectives, copied=copies * training.trainable_parameters)

    # The life cycle

    def setup(self, trainer: TrainerLike) -> None:
        super().setup(trainer)
        if trainer.is_fitting:
            self._start_algorithm()

    def _start_algorithm(self) -> None:
        named = [*canonical_parameters(self.module).items()]
        trainable = {name: parameter for name, parameter in named if parameter.requires_grad}
        self._frozen = [(name, parameter) for name, parameter in named if not parameter.requires_grad]
        self._set_differing(self.algorithm.replicas_differ and self.world_size > 1)
        replica = Replica(
            parameters=trainable,
            optimizers=self.optimizers,
            device=self.root_device,
            rank=self.global_rank,
            world_size=self.world_size,
            node_rank=self.node_rank,
            timeout=self.timeout,
        )
        self._replica = replica
        self.algorithm.setup(replica)
        if self.algorithm.exchanges_gradients:
            self._watch_gradients()

    def _watch_gradients(self) -> None:
        modules = self.module.children() if isinstance(self.module, SeparateModules) else [self.module]
        self._gradients = GradientExchange(
            [[one for one in module.named_parameters() if one[1].requires_grad] for module in modules],
            self.algorithm.reduce_gradients,
            flatten=self._flatten,
            find_unused=self._find_unused if self._finds_unused else None,
        )

    def _find_unused(self, has_gradient: list[bool]) -> list[bool]:
        flags = self.from_host(torch.tensor(has_gradient, dtype=torch.int32))
        return [bool(flag) for flag in self.reduce(flags, reduce_op="max").tolist()]

    def finish_training(self) -> None:
        super().finish_training()
        self.algorithm.finish()  # before the average, which a late exchange would change
        if self._differs:
            self._average_weights()
            # Each rank has the same then, so that global rank 0 alone can save it.
            for optimizer in self.optimizers:
                load_named_state(optimizer, self.module, self.sharded_optimizer_state(optimizer))
            self._set_differing(False)

    def on_exception(self, exception: BaseException) -> None:
        self._end_algorithm()
        super().on_exception(exception)

    def teardown(self) -> None:
        self._end_algorithm()
        super().teardown()

    def _end_algorithm(self) -> None:
        self._close_gradients()
        if self._replica is not None:
            self.algorithm.close()
            self._replica.close()
            self._replica = None
        self._frozen = []

    def _close_gradients(self) -> None:
        if self._gradients is not None:
            self._gradients.close()
            self._gradients = None

    # Steps

    @contextmanager
    def no_backward_sync(self) -> Iterator[None]:
        was_accumulating = self._is_accumulating
        self._set_accumulating(True)
        try:
            yield
        finally:
            self._set_accumulating(was_accumulating)

    def _set_accumulating(self, is_accumulating: bool) -> None:
        self._is_accumulating = is_accumulating
        if self._gradients is not None:
            self._gradients.is_accumulating = is_accumulating

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._gradients is not None:
            self._gradients.outside = None
        if self._replica is not None:
            if self._frozen and any(parameter.requires_grad for _, parameter in self._frozen):
                self._add_unfrozen()
            if not self._is_accumulating:
                self.algorithm.before_forward()
        return super().training_step(*args, **kwargs)

    def _add_unfrozen(self) -> None:
        """Exchange the gradients of parameters that were frozen before, too.

        Raises:
            MisuseError: The algorithm exchanges weights, of which ranks would have different ones.
        """
        if self.algorithm.replicas_differ:
            name = next(name for name, parameter in self._frozen if parameter.requires_grad)
            raise MisuseError(
                f"{name!r} was frozen when the training began and is not any more, and {type(self.algorithm).__name__} "
                "averages the weights that were trainable then: unfreeze it before the training"
            )
        self._close_gradients()  # buckets have the parameters of their time
        self._frozen = [(name, parameter) for name, parameter in self._frozen if not parameter.requires_grad]
        self._watch_gradients()

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        self._has_gradients = True
        if self._gradients is None or self._is_accumulating:
            super().backward(loss, *args, **kwargs)
        else:
            with self._gradients.during_backward():
                super().backward(loss, *args, **kwargs)
            # As DistributedDataParallel does: each rank has statistics of its own batches.
            self.broadcast_tensors(self.module.buffers())

    @property
    def weighs_losses(self) -> bool:
        return not self._differs

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Module | None = None, **kwargs: Any
    ) -> Any:
        def compute_gradients() -> Any:
            output = closure()
            if self._gradients is not None:
                self._gradients.check_synchronized()
            if self._replica is not None:
                self.algorithm.before_step()
            return output

        output = super().optimizer_step(optimizer, compute_gradients, model, **kwargs)
        self._has_gradients = False
        if self._replica is not None:
            self._replica.steps += 1
            self.algorithm.after_step()
            if not self.algorithm.exchanges_gradients:  # such as when the warm-up of 'async' is over
                self._close_gradients()
        return output

    # Averages of replicas that differ

    def _average_weights(self) -> None:
        average_tensors(self._trainable())
        self.broadcast_tensors(self.module.buffers())

    def _trainable(self) -> list[Parameter]:
        """Return the parameters that were trainable when the training began."""
        return [] if self._replica is None else [*self._replica.parameters.values()]

    @contextmanager
    def evaluation_context(self) -> Iterator[None]:
        with super().evaluation_context():
            if not self._differs:
                yield
                return
            tensors = [*self._trainable(), *self.module.buffers()]
            # A copy: the average is of no rank, and the training goes on with the weights of each.
            local = [tensor.detach().clone() for tensor in tensors]
            self._average_weights()
            try:
                yield
            finally:
                with torch.no_grad():
                    for tensor, value in zip(tensors, local, strict=True):
                        tensor.copy_(value)

    def sharded_module_state(self) -> dict[str, Any]:
        state = super().sharded_module_state()
        if not self._differs:
            return state
        trainable = {id(parameter) for parameter in self._trainable()}
        named = self.module.named_parameters(remove_duplicate=False)
        names = {canonical_name(name) for name, parameter in named if id(parameter) in trainable}
        return state | self._averaged({name: one for name, one in state.items() if canonical_name(name) in names})

    def load_sharded_module_state(self, state: dict[str, Any]) -> None:
        super().load_sharded_module_state(state)
        if self._differs:
            missing, unexpected = load_by_names(self.module, state)
            check_names(self.module, missing, unexpected, strict=False, logs=self.is_global_zero)

    def local_weights(self) -> dict[str, Any]:
        if not self.replicates_state:
            raise ConflictError(
                f"with the algorithm {type(self.algorithm).__name__} each process trains weights of its own, and "
                'evaluation and checkpoints use their mean; algorithm="gradient_allreduce" has the same in all of them'
            )
        return super().local_weights()

    def sharded_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        state = super().sharded_optimizer_state(optimizer)
        return self._averaged(state) if self._differs else state

    def _averaged(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a state with averages of its floating-point tensors over all ranks.

        Ranks whose optimizers have states of different parameters get that of global rank 0.
        """
        # Sorted, as an optimizer has its state in the order in which parameters got their first gradients.
        tensors = dict(sorted(_tensors_by_path(state)))
        layout = [(path, tuple(tensor.shape), str(tensor.dtype)) for path, tensor in tensors.items()]
        if self.reduce_boolean_decision(layout != self.broadcast(layout), all=False):
            return self.broadcast(state)
        averages = {id(tensor): tensor.detach().to(self.root_device, copy=True) for tensor in tensors.values()}
        average_tensors([*averages.values()])
        averaged: dict[str, Any] = apply_to_tensors(
            state, lambda tensor: averages[id(tensor)].to(tensor.device) if id(tensor) in averages else tensor
        )
        return averaged

    # State of each rank

    def state_dict(self) -> dict[str, Any]:
        steps = 0 if self._replica is None else self._replica.steps
        return {"algorithm": type(self.algorithm).__name__, "steps": steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self._replica is not None:
            self._replica.steps = state["steps"]
            if not self.algorithm.exchanges_gradients:  # its warm-up was over
                self._close_gradients()
        self._loads_rank_state = state["algorithm"] == type(self.algorithm).__name__
        if not self._loads_rank_state and self.is_global_zero:
            _logger.warning(
                "the checkpoint was saved with %s, and %s resumes from the average of the weights of its ranks",
                state["algorithm"],
                type(self.algorithm).__name__,
            )

    def rank_state(self) -> dict[str, Any]:
        if self._replica is None or not self._differs:
            return {}
        parameters = canonical_parameters(self.module)
        gradients = {name: one.grad for name, one in parameters.items() if one.grad is not None}
        return {
            "weights": {name: parameter.detach() for name, parameter in self._replica.parameters.items()},
            "optimizers": [named_state(optimizer, self.module) for optimizer in self.optimizers],
            # Only within an accumulation: after a step .grad has what the next zero_grad clears.
            "gradients": gradients if self._has_gradients else {},
            "algorithm": self.algorithm.rank_state(),
        }

    @torch.no_grad()
    def load_rank_state(self, state: Mapping[str, Any]) -> None:
        if not state or not self._differs or not self._loads_rank_state:
            return
        # Older checkpoints have the names of torch's wrappers.
        weights, gradients = (
            {canonical_name(name): one for name, one in state[key].items()} for key in ("weights", "gradients")
        )
        for name, parameter in canonical_parameters(self.module).items():
            if name in weights:
                parameter.copy_(weights[name])
            if name in gradients:
                parameter.grad = gradients[name].to(parameter.device, copy=True)
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            load_named_state(optimizer, self.module, saved)
        self._has_gradients = bool(state["gradients"])
        self.algorithm.load_rank_state(state["algorithm"])


def _tensors_by_path(state: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the dense floating-point tensors of a nested state, each with its keys."""
    if isinstance(state, Tensor):
        if state.is_floating_point() and state.layout is torch.strided:
            yield path, state
    elif isinstance(state, Mapping):
        for key, value in state.items():
            yield from _tensors_by_path(value, f"{path}/{key}")
    elif isinstance(state, list | tuple):
        for index, value in enumerate(state):
            yield from _tensors_by_path(value, f"{path}/{index}")
