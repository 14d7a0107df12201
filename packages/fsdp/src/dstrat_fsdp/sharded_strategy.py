"""Base of the strategies that shard a module with ``fully_shard``."""

from __future__ import annotations

import functools
import logging
from abc import abstractmethod
from collections import defaultdict
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor

from dstrat.checkpoint.whole_state import gather_state, scatter_module_state
from dstrat.errors import MisuseError
from dstrat.interfaces.checkpoint_io import OptionalTensors
from dstrat.interfaces.state_dict import load_named_state, named_state
from dstrat.parallel.collectives import take_from_first_rank
from dstrat.parallel.optimizer_checks import check_optimizers
from dstrat.parallel.strategy import ParallelStrategy
from dstrat_fsdp.checks import check_gradients, check_steps_shards, shards_explained
from dstrat_fsdp.gradients import clip_by_norm, clip_by_value
from dstrat_fsdp.mesh import release_mesh
from dstrat_fsdp.parameters import make_whole, materialize, parameters_on_meta, put_to_rest, wake
from dstrat_fsdp.sharded_module import ShardedModule
from dstrat_fsdp.state import as_shards, load_optimizer
from dstrat_fsdp.wrap_policy import outermost_layers, running_statistics

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh
    from torch.nn import Module
    from torch.optim import Optimizer

    from dstrat.interfaces.precision import ClipAlgorithm
    from dstrat.interfaces.strategy import StepName, TrainerLike
    from dstrat_fsdp.options import StateDictType
    from dstrat_fsdp.sharded_module import Sharding
    from dstrat_fsdp.wrap_policy import ActivationCheckpointing

_logger = logging.getLogger(__name__)


class ShardedStrategy(ParallelStrategy):
    """A strategy whose ranks keep shards of parameters, gradients and optimizer state.

    A subclass says over which mesh, what the blocks are and how they are sharded.  The module is that of the user
    again after the run: its parameters are the shards, on the CPU, with which another run of the same size can go on;
    ``state_dict_type="full"`` gathers them on each rank instead.
    """

    replicates_state = False
    saves_gradients = True
    evaluates_together = True  # each step gathers parameters
    allows_inference_mode = False  # what is gathered needs torch's version counters

    _mesh: DeviceMesh | None = None
    _sharded: ShardedModule | None = None
    _failed = False
    _state_dict_type: StateDictType
    _checkpointing: ActivationCheckpointing

    # What a subclass says

    @abstractmethod
    def _open_mesh(self) -> DeviceMesh:
        """Return the mesh of all processes; collective."""

    @abstractmethod
    def _sharding(self) -> Sharding:
        """Return how parameters are sharded."""

    @abstractmethod
    def _blocks(self) -> Sequence[Module]:
        """Return the parts of the module that are gathered by themselves, inner ones first."""

    @property
    def _can_go_on(self) -> bool:
        """Whether another run can take the shards that this one leaves."""
        return True

    # The life cycle

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh of all processes, when communication is open."""
        if self._mesh is None:
            raise MisuseError(
                f"{type(self).__name__} has no device mesh yet: it is there from configure_model on, in each rank"
            )
        return self._mesh

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_mesh": None}

    def setup_environment(self) -> None:
        super().setup_environment()
        self._failed = False
        self._mesh = self._open_mesh()

    def model_sharded_context(self) -> AbstractContextManager[Any]:
        """Return the context in which parameters are made without memory.

        Each rank computes them when they are sharded, one layer after the other, by the layer's ``reset_parameters``.
        """
        return parameters_on_meta()

    def model_to_device(self) -> None:
        """Do nothing: each part goes to the device when it is sharded."""

    def wrap_model(self, trainer: TrainerLike) -> None:  # noqa: ARG002 - evaluation is sharded too
        module, sharding = self.module, self._sharding()
        resting = wake(module, self.device_mesh)
        blocks = list(self._blocks())
        around_steps = getattr(module, "automatic_optimization", True)
        if not around_steps:
            blocks += [layer for layer in outermost_layers(module) if layer not in blocks]
        self._checkpointing.apply(module)
        self._take_first_values(module)
        self._sharded = ShardedModule(module, sharding, blocks, around_steps=around_steps)
        shards_on = torch.device("cpu") if isinstance(sharding.offload_policy, CPUOffloadPolicy) else self.root_device
        materialize(self._sharded.root, shards_on, resting.shard if resting else _no_shard)
        self.model = self._sharded.root

    def _take_first_values(self, module: Module) -> None:
        """Let all ranks begin with the values of rank 0, as each keeps a part of its own."""
        for part in module.modules():
            tensors = [*part.parameters(recurse=False), *part.buffers(recurse=False)]
            plain = [tensor for tensor in tensors if not isinstance(tensor, DTensor)]
            for tensor in plain:
                if not tensor.is_meta:
                    tensor.data = tensor.to(self.root_device)
            take_from_first_rank(plain)
            self._take_first_parts([tensor for tensor in tensors if isinstance(tensor, DTensor)])

    def _take_first_parts(self, split: Sequence[DTensor]) -> None:
        """Do the same for tensors that are split already, where several ranks have the same part."""

    def setup_optimizers(self, trainer: TrainerLike) -> None:
        super().setup_optimizers(trainer)
        check_optimizers(self.optimizers, self.module)
        check_gradients(self.module, type(self).__name__)
        if self.world_size > 1:
            check_steps_shards(self.optimizers, type(self).__name__)
        for optimizer in self.optimizers:
            optimizer.zero_grad = self._clearing(optimizer)  # type: ignore[method-assign]  # until the run ends

    def _clearing(self, optimizer: Optimizer) -> Callable[..., None]:
        """Return the optimizer's ``zero_grad``, for the gradients too that are not reduced yet."""
        zero_grad, sharded = optimizer.zero_grad, self._sharded_module

        @functools.wraps(zero_grad)
        def clear(*args: Any, **kwargs: Any) -> None:
            zero_grad(*args, **kwargs)
            sharded.drop_accumulated(optimizer)

        return clear

    def on_exception(self, exception: BaseException) -> None:
        self._failed = True
        self._end_sharding()
        super().on_exception(exception)

    def teardown(self) -> None:
        self._end_sharding()
        super().teardown()

    def _end_sharding(self) -> None:
        if self._sharded is not None:
            self._sharded.undo()
            self._checkpointing.undo()
            if self._state_dict_type == "full" and not self._failed:
                make_whole(self.module)
            else:
                put_to_rest(self.module, self.device_mesh, can_go_on=self._can_go_on)
            self._sharded = None
            self.model = self.module
        if self._mesh is not None:
            release_mesh(self._mesh)
            self._mesh = None

    def evaluation_context(self) -> AbstractContextManager[Any]:
        # In training each process computes the statistics of batch norm from its own data; checkpoints have those of
        # rank 0. A training step reads none of them, so that it is the same with and without validation.
        self.take_from_first_rank(running_statistics(self.module))
        return super().evaluation_context()

    # Steps: each of them gathers parameters, so that every rank takes part in every one

    def run_step(self, name: StepName, step: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        sharded = self._sharded_module
        run = sharded.train if name == "training_step" else sharded.evaluate
        with self.precision_plugin.forward_context():
            return run(step, *args, **kwargs)

    @property
    def _sharded_module(self) -> ShardedModule:
        return self._present(self._sharded, "sharded module")

    @contextmanager
    def no_backward_sync(self) -> Iterator[None]:
        """Accumulate gradients without communication: whole, on each rank, until the next backward pass outside."""
        self._sharded_module.set_gradient_sync(False)
        try:
            yield
        finally:
            self._sharded_module.set_gradient_sync(True)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        with shards_explained():
            super().backward(loss, *args, **kwargs)

    def clip_gradients(self, optimizer: Optimizer, clip_val: float, algorithm: ClipAlgorithm = "norm") -> None:
        """Clip the gradients of an optimizer's parameters in place, by what they are on all ranks together."""
        self.unscale_gradients(optimizer)
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if algorithm == "value":
            clip_by_value(parameters, clip_val)
        else:
            clip_by_norm(parameters, clip_val)

    # State

    def module_state_dict(self) -> dict[str, Any]:
        """Return the whole state of the module on global rank 0, and an empty dict on the others; collective."""
        return gather_state(self.sharded_module_state(), self)

    def load_module_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Load the whole state that global rank 0 has; collective."""
        scatter_module_state(self, state, self.module.state_dict(), strict=strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the whole state of an optimizer on global rank 0, and an empty dict on the others; collective."""
        return gather_state(optimizer.state_dict(), self)

    def load_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Load the whole state of an optimizer that global rank 0 has; collective."""
        load_optimizer(optimizer, state, self)

    def sharded_module_state(self) -> dict[str, Any]:
        """Return the state of the module by its own names; parameters are DTensors of this rank's shards."""
        if self._sharded is not None:
            self._sharded.free()  # otherwise what is gathered would be in it
            self._sharded.leave_low_precision()
        state: dict[str, Any] = self.module.state_dict()
        return state

    def sharded_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of an optimizer by the names of its parameters, as DTensors of this rank's shards."""
        return named_state(optimizer, self.module)

    def optimizer_template(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the same with empty tensors; where the optimizer has no state yet, those that a step would make."""
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

        kept = optimizer.state
        optimizer.state = defaultdict(dict)  # which torch fills by a step that changes nothing else
        try:
            template: dict[str, Any] = get_optimizer_state_dict(self.module, optimizer)
        finally:
            optimizer.state = kept
        return {**template, "state": OptionalTensors(template["state"])}

    def rank_state(self) -> dict[str, Any]:
        """Return the gradients of this rank that wait for an optimizer step."""
        return {"gradients": self._sharded_module.waiting_gradients(), "mesh": list(self.device_mesh.shape)}

    def load_rank_state(self, state: Mapping[str, Any]) -> None:
        """Let the next backward pass accumulate onto the gradients that were saved; collective."""
        if not self.reduce_boolean_decision(bool(state.get("gradients")), all=False):
            return
        if state["mesh"] == list(self.device_mesh.shape):
            self._sharded_module.put_back_gradients(state["gradients"])
        elif self.is_global_zero:
            _logger.warning(
                "the checkpoint has gradients that were not cleared when it was saved, sharded over a mesh of %s: "
                "over %s they are left out",
                tuple(state["mesh"]),
                tuple(self.device_mesh.shape),
            )

    def load_sharded_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Load what :meth:`sharded_optimizer_state` returned, or the same with whole tensors; collective."""
        load_named_state(optimizer, self.module, as_shards(state, self.module))


def _no_shard(layer: Module, name: str) -> Tensor | None:  # noqa: ARG001 - there are none
    return None
