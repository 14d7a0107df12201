"""Training with torch_xla's FullyShardedDataParallel: one process for each device, each with shards of the module."""

from __future__ import annotations

import inspect
import logging
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from dstrat.errors import ConflictError, RequestError
from dstrat.interfaces.checkpoint_io import FlatShard, OptionalTensors
from dstrat.interfaces.communication import Collective, CommunicationLayout
from dstrat.interfaces.state_dict import canonical_parameters, load_named_state, named_state, parameter_names
from dstrat.interfaces.strategy import Strategy
from dstrat.parallel.optimizer_checks import state_after_one_step
from dstrat.parallel.process_group import DEFAULT_TIMEOUT
from dstrat_xla import runtime
from dstrat_xla.sharding import ShardedModule, block_policy, checked_classes, unwrapped_name, wrapper_class
from dstrat_xla.strategy import XLAStrategy

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence
    from datetime import timedelta

    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer

    from dstrat.interfaces.accelerator import Accelerator
    from dstrat.interfaces.checkpoint_io import CheckpointIO
    from dstrat.interfaces.cluster import ClusterEnvironment
    from dstrat.interfaces.memory import TrainingSize
    from dstrat.interfaces.precision import ClipAlgorithm, Precision
    from dstrat.interfaces.strategy import Components, StepName, TrainerLike

_log = logging.getLogger(__name__)


class XLAFSDPStrategy(XLAStrategy):
    """Training with torch_xla's FullyShardedDataParallel (its first version), one process for each device.

    Each process keeps a shard of each parameter, with its gradient and optimizer state; a layer is gathered before its
    forward and backward passes.  The module keeps its names: parameters that ``configure_optimizers`` gets are flat
    shards, and checkpoints have full tensors under the names of the module.  After a run each process has the full
    parameters again.  If one process drives all devices of a machine, torch_xla recommends ``xla_spmd`` with an axis
    ``"fsdp"`` instead.

    Args:
        accelerator: The hardware.
        parallel_devices: The devices of this machine, one for each local rank.
        checkpoint_io: How checkpoints reach storage.
        precision_plugin: The dtypes; torch_xla shards parameters in float32 only.
        auto_wrap_policy: Classes of layers that are gathered by themselves, or a policy as torch_xla takes it; None
            gathers the full module in each step.
        activation_checkpointing_policy: Classes of layers that keep no activations for the backward pass, among those
            that are gathered by themselves.
        state_dict_type: ``"sharded"``: each process writes its shards; ``"full"``: global rank 0 has full tensors.
        sequential_save: Accepted as in Lightning, without effect: a checkpoint is always written tensor by tensor.
        debug: Whether torch_xla reports compilations and slow operations (``PT_XLA_DEBUG``).
        sync_module_states: Whether all processes begin with the parameters and buffers of global rank 0.
        cluster_environment: Where the job runs.
        timeout: How long a process waits for the others before the job fails.
        start_method: ``"popen"`` (re-run the script), ``"spawn"``, ``"fork"`` or ``"forkserver"``.
        **kwargs: Arguments of ``torch_xla.distributed.fsdp.XlaFullyShardedDataParallel``.

    Raises:
        RequestError: An option has an impossible value.
    """

    replicates_state = False
    evaluates_together = True  # each step gathers parameters

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: Sequence[torch.device] | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        auto_wrap_policy: Collection[type[Module]] | Callable[..., bool] | None = None,
        activation_checkpointing_policy: Collection[type[Module]] | None = None,
        state_dict_type: str = "sharded",
        sequential_save: bool = False,
        debug: bool = False,
        sync_module_states: bool = True,
        cluster_environment: ClusterEnvironment | None = None,
        timeout: timedelta | None = DEFAULT_TIMEOUT,
        start_method: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            accelerator,
            parallel_devices,
            checkpoint_io,
            precision_plugin,
            debug,
            sync_module_states,
            cluster_environment,
            timeout=timeout,
            start_method=start_method,
        )
        if state_dict_type not in {"sharded", "full"}:
            raise RequestError(f"state_dict_type {state_dict_type!r} is not possible: choose 'sharded' or 'full'")
        if not callable(auto_wrap_policy):
            checked_classes("auto_wrap_policy", auto_wrap_policy)
        self._auto_wrap_policy = auto_wrap_policy
        self._checkpointed = checked_classes("activation_checkpointing_policy", activation_checkpointing_policy)
        self.saves_full_state = state_dict_type == "full"
        self._options = kwargs
        self._sharded: ShardedModule | None = None
        if sequential_save:
            _log.info("sequential_save=True changes nothing: each process writes a checkpoint tensor by tensor")

    def set_components(self, components: Components) -> None:
        super().set_components(components)
        possible = [
            name for name in inspect.signature(wrapper_class().__init__).parameters if name not in _SET_BY_STRATEGY
        ]
        for name in self._options:
            if name not in possible:
                raise RequestError(
                    f"{type(self).__name__} has no argument {name!r}, and torch_xla's XlaFullyShardedDataParallel "
                    f"takes {', '.join(one for one in possible if not one.startswith('_'))}"
                )
        if self._options.get("flatten_parameters"):
            raise RequestError(
                "flatten_parameters=True is not possible: optimizers and checkpoints need parameters by their names; "
                "leave it out"
            )

    def communication_layout(self, training: TrainingSize) -> CommunicationLayout | None:
        policy = self._auto_wrap_policy
        if callable(policy):  # which layers it selects is torch_xla's to say
            return None
        in_blocks = {
            parameter: None
            for layer in training.module.modules()
            if isinstance(layer, tuple(policy or ()))
            for parameter in layer.parameters()
        }
        parameters = list(training.module.parameters())
        item = (self._options.get("compute_dtype") or torch.float32).itemsize
        # A block is gathered again in the backward pass; the module itself stays gathered.
        again = in_blocks if self._options.get("reshard_after_forward", True) else {}
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        gather = Collective(
            kind="all_gather",
            bytes=training.accumulate_grad_batches * item * sum(one.numel() for one in (*parameters, *again)),
            messages=training.accumulate_grad_batches * (len(parameters) + len(again)),
            ranks=training.world_size,
            in_each_batch=True,
        )
        reduction = Collective(
            kind="reduce_scatter",
            bytes=(4 if self._options.get("fp32_reduce_scatter") else item) * sum(one.numel() for one in trained),
            messages=len(trained),
            ranks=training.world_size,
        )
        return CommunicationLayout(collectives=(gather, reduction))

    # The life cycle

    def model_to_device(self) -> None:
        """Do nothing: each layer is moved when it is sharded."""

    @override
    def wrap_model(self, trainer: TrainerLike) -> None:
        if self.sync_module_states and self.world_size > 1:
            self.broadcast_tensors([*self.module.parameters(), *self.module.buffers()])
        self._sharded = ShardedModule(
            self.module,
            block_policy(self._auto_wrap_policy),
            lambda layer: isinstance(layer, self._checkpointed),
            self._options,
        )
        self.model = self._sharded.root
        self.mark_step()

    def on_exception(self, exception: BaseException) -> None:
        if self.world_size > 1:  # the module stays sharded: gathering would wait for a rank that is gone
            self._sharded = None
        self._end_sharding()
        super().on_exception(exception)

    def teardown(self) -> None:
        self._end_sharding()
        super().teardown()

    def _end_sharding(self) -> None:
        if self._sharded is not None:
            sharded, self._sharded = self._sharded, None
            sharded.undo()
            self.model = self.module

    @property
    def _sharded_module(self) -> ShardedModule:
        return self._present(self._sharded, "sharded module")

    # Steps

    def run_step(self, name: StepName, step: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        return super().run_step(name, partial(self.model, step), *args, **kwargs)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Compute gradients of a loss; torch_xla reduces and shards them in the backward pass."""
        Strategy.backward(self, loss, *args, **kwargs)  # not XLAStrategy's, which would average the shards again

    @contextmanager
    def no_backward_sync(self) -> Iterator[None]:
        """Accumulate unsharded gradients, without communication."""
        if self.world_size == 1:
            yield
            return
        with self._sharded_module.root.no_sync():
            yield

    @torch.no_grad()
    def clip_gradients(self, optimizer: Optimizer, clip_val: float, algorithm: ClipAlgorithm = "norm") -> None:
        """Clip the gradients of an optimizer's parameters in place, by their norm over all ranks, or by value."""
        if algorithm == "value" or self.world_size == 1:
            super().clip_gradients(optimizer, clip_val, algorithm)
            return
        self.unscale_gradients(optimizer)
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        squares = torch.stack([gradient.square().sum() for gradient in gradients]).sum()
        norm = runtime.xla_model().all_reduce(runtime.xla_model().REDUCE_SUM, squares).sqrt()
        for gradient in gradients:  # multiplied in any case: a comparison would read the norm, and cut the graph
            gradient.mul_((clip_val / (norm + 1e-6)).clamp(max=1.0))

    # State: copies on the host, where a checkpoint is read; shards in a portable one, full tensors in others

    @property
    def _on_host_as(self) -> Callable[..., Any]:
        """Return the function that copies a parameter, or a tensor that is sharded like it, to the host; collective."""
        sharded = self._sharded_module
        # The devices gather faster than the hosts, which would do so afterwards.
        is_full = self.saves_full_state or not self.checkpoint_io.is_collective
        return sharded.full_tensor if is_full else sharded.host_shard_of

    def sharded_module_state(self) -> dict[str, Any]:
        """Return copies on the host; :meth:`load_sharded_module_state` sends them back."""
        runtime.settle()
        state, copy = self._entries(), self._on_host_as
        for name, value in state.items():
            if isinstance(value, torch.nn.Parameter):
                state[name] = copy(value)
            elif isinstance(value, torch.Tensor):
                state[name] = value.detach().cpu()
        return state

    @torch.no_grad()
    def load_sharded_module_state(self, state: dict[str, Any]) -> None:
        for name, value in self._entries().items():
            if name in state and isinstance(value, torch.nn.Parameter):
                self._sharded_module.copy_shard(value, value, state[name])
            elif name in state and isinstance(value, torch.Tensor):
                value.copy_(state[name])
        self.mark_step()

    def local_weights(self) -> dict[str, Any]:
        """Raise an error: an average would be on the lazy device, where its shards cannot be saved.

        Raises:
            ConflictError: Always.
        """
        raise ConflictError(
            f"{type(self).__name__} saves copies of its shards on the host, and an average would be on the device; "
            "strategy='xla' can"
        )

    def _entries(self) -> dict[str, Any]:
        """Return the module's state under the module's names, with parameters that are not detached."""
        state = self.module.state_dict(keep_vars=True)
        return {unwrapped_name(name): value for name, value in state.items()}

    def sharded_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        runtime.settle()
        sharded, copy = self._sharded_module, self._on_host_as
        state = named_state(optimizer, sharded)  # type: ignore[arg-type]  # has named_parameters
        parameters = canonical_parameters(sharded)  # type: ignore[arg-type]  # as above
        for name, entry in state["state"].items():
            parameter = parameters[name]
            state["state"][name] = {
                key: copy(parameter, value) if sharded.is_sharded_like(parameter, value) else value
                for key, value in entry.items()
            }
        return state

    def parameter_names(self, optimizer: Optimizer) -> Sequence[Sequence[str]]:
        return parameter_names(optimizer, self._sharded_module)  # type: ignore[arg-type]  # as above

    def optimizer_template(self, optimizer: Optimizer) -> dict[str, Any]:
        sharded = self._sharded_module
        template = named_state(optimizer, sharded)  # type: ignore[arg-type]  # as above
        entries: dict[str, Any] = {}
        for number, group in enumerate(optimizer.param_groups):
            for parameter, name in zip(group["params"], template["param_groups"][number]["params"], strict=True):
                # By a step on the CPU: which keys are tensors like the parameter depends on the optimizer's options.
                probe = state_after_one_step(optimizer, number, torch.zeros(2))
                sharded_keys = [key for key, value in probe.items() if getattr(value, "shape", None) == (2,)]
                entries[name] = {
                    key: sharded.host_shard_of(parameter, torch.zeros_like(parameter)) for key in sharded_keys
                }
        return {**template, "state": OptionalTensors(entries)}

    def load_sharded_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        parameters = canonical_parameters(self._sharded_module)  # type: ignore[arg-type]  # as above
        entries = {
            name: {key: self._as_stored(parameters.get(name), value) for key, value in entry.items()}
            for name, entry in state["state"].items()
        }
        load_named_state(optimizer, self._sharded_module, {**state, "state": entries})  # type: ignore[arg-type]  # as above
        self.mark_step()

    def _as_stored(self, parameter: Tensor | None, value: Any) -> Any:
        """Return a full tensor or a shard of an optimizer's state as this process's padded shard."""
        sharded = self._sharded_module
        is_full = isinstance(value, torch.Tensor) and value.dim() > 0
        if parameter is None or not (isinstance(value, FlatShard) or is_full):
            return value
        if tuple(value.shape) != tuple(sharded.shard_of(parameter).shape):
            return value
        target = torch.zeros_like(parameter.detach(), dtype=value.dtype)  # zeros, as in torch_xla's own padding
        sharded.copy_shard(parameter, target, value)
        return target


_SET_BY_STRATEGY = ("self", "module", "auto_wrap_policy", "auto_wrapper_callable")
