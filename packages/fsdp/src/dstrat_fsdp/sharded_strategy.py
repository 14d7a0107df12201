"""Base of the strategies that shard a module with ``fully_shard``."""

from __future__ import annotations

import functools
import logging
from abc import abstractmethod
from collections import defaultdict
from contextlib import AbstractContextManager, contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor
from typing_extensions import override

from dstrat.errors import MisuseError
from dstrat.interfaces.checkpoint_io import OptionalTensors
from dstrat.interfaces.state_dict import canonical_parameters, named_weights
from dstrat.parallel.collectives import broadcast_tensors, running_statistics
from dstrat.parallel.meta_device import parameters_on_meta
from dstrat.parallel.optimizer_checks import check_layout, check_optimizers
from dstrat.parallel.strategy import ParallelStrategy
from dstrat_fsdp import internals
from dstrat_fsdp.checks import (
    check_gradients,
    check_hooks,
    check_optimizer_classes,
    check_steps_shards,
    explain_shards,
)
from dstrat_fsdp.gradients import clip_by_norm, clip_by_value
from dstrat_fsdp.options import input_dtype, offload_policy, precision_policy
from dstrat_fsdp.parameters import (
    check_reusable,
    discard_parameters,
    discard_shards,
    gather_parameters,
    materialize,
    parameter_attributes,
    park_shards,
    restore_attributes,
    unpark_shards,
)
from dstrat_fsdp.shard_access import draw_full_values, make_plain_tensors, read_full_values
from dstrat_fsdp.sharded_module import ShardedModule, Sharding
from dstrat_fsdp.wrap_policy import outermost_layers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import CPUOffload, MixedPrecision, MixedPrecisionPolicy
    from torch.nn import Module
    from torch.optim import Optimizer

    from dstrat.interfaces.memory import TrainingSize
    from dstrat.interfaces.precision import ClipAlgorithm, Precision
    from dstrat.interfaces.strategy import StepName, TrainerLike
    from dstrat_fsdp.options import StateDictType
    from dstrat_fsdp.wrap_policy import WrapPolicy

_logger = logging.getLogger(__name__)


class ShardedStrategy(ParallelStrategy):
    """A strategy whose ranks keep shards of parameters, gradients and optimizer state.

    A subclass defines the mesh, the blocks and how they are sharded.  After the run the module is a plain one again:
    its parameters are the shards, on the CPU, with which another run of the same size can continue;
    ``state_dict_type="full"`` gathers them on each rank instead.
    """

    replicates_state = False
    saves_gradients = True
    evaluates_together = True  # each step gathers parameters
    allows_inference_mode = False  # gathered parameters need torch's version counters

    _mesh: DeviceMesh | None = None
    _sharded: ShardedModule | None = None
    _failed = False
    _attributes: Mapping[tuple[Module, str], Mapping[str, Any]] = MappingProxyType({})  # of parameters, during a setup
    _has_no_values = False  # of parameters on the meta device, which a checkpoint has
    _state_dict_type: StateDictType
    # Of the user
    _cpu_offload: bool | CPUOffloadPolicy | CPUOffload | None = None
    _mixed_precision: MixedPrecisionPolicy | MixedPrecision | None = None
    _auto_wrap_policy: WrapPolicy | None = None

    # Hooks of subclasses

    @abstractmethod
    def _open_mesh(self) -> DeviceMesh:
        """Return the mesh of all processes; collective."""

    @abstractmethod
    def _sharding(self) -> Sharding:
        """Return how parameters are sharded."""

    @abstractmethod
    def _blocks(self) -> Sequence[Module]:
        """Return the layers of the module that become units, inner ones first."""

    def _divide_layers(self) -> tuple[Module, set[Module]]:
        """Free what other ranks compute; return a module with the rest, and what was freed on the meta device."""
        return self.module, set()

    @property
    def _rank_layout(self) -> dict[str, Any]:
        """What determines which part of the state this rank has, by name."""
        return {"mesh": list(self.device_mesh.shape)}

    @property
    def _layout_of_shards(self) -> dict[str, Any]:
        """What determines the shards of this rank, by name."""
        return {**self._rank_layout, "coordinate": list(self.device_mesh.get_coordinate() or ())}

    @property
    def _is_reusable(self) -> bool:
        """Whether another run can use the shards that this one parks."""
        return True

    def forward_dtype(self, precision: Precision) -> torch.dtype:
        return precision_policy(self._mixed_precision, precision).param_dtype or precision.param_dtype

    # The life cycle

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh of all processes, when communication is open."""
        if self._mesh is None:
            raise MisuseError(
                f"{type(self).__name__} has no device mesh yet: it is available from configure_model on, in each rank"
            )
        return self._mesh

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_mesh": None}  # its groups are those of this process

    def setup_environment(self) -> None:
        if self._cpu_offload and self.process_group_backend is None and self.root_device.type != "cpu":
            # Gradients are on the CPU then, and their norms are reduced there, by gloo.
            self.process_group_backend = f"cpu:gloo,{self.root_device.type}:{self.accelerator.process_group_backend}"
        super().setup_environment()
        self._failed = False
        self._mesh = self._open_mesh()

    def model_sharded_context(self) -> AbstractContextManager[Any]:
        """Return the context in which parameters are created on the meta device.

        Each rank computes their values when they are sharded, layer by layer, with ``reset_parameters``.

        Raises:
            MisuseError: An earlier run has split layers of the module, which its hooks would split again.
        """
        if self._module is not None:  # a loop of one's own may make it in this context
            check_reusable(self._module)
        return parameters_on_meta()

    def _sharding_over(self, mesh: DeviceMesh, **options: Any) -> Sharding:
        """Return how parameters are sharded over a mesh, with other options of :class:`Sharding`."""
        return Sharding(
            mesh=mesh,
            precision_policy=precision_policy(self._mixed_precision, self.precision_plugin),
            offload_policy=offload_policy(self._cpu_offload, self.root_device),
            input_dtype=input_dtype(self._mixed_precision, self.precision_plugin),
            sums_gradients=not self.accelerator.averages_in_collectives,
            **options,
        )

    def model_to_device(self) -> None:
        """Do nothing: each layer is moved when it is sharded."""

    @override
    def wrap_model(self, trainer: TrainerLike) -> None:
        self.precision_plugin.reduce_overflow = functools.partial(dist.all_reduce, op=dist.ReduceOp.MAX)
        module, sharding = self.module, self._sharding()
        check_reusable(module)
        blocks = list(self._blocks())  # before its parameters are moved: it may raise an error
        # Manual optimization runs backward passes and optimizer steps within the root's forward, and torch reduces the
        # root's own gradients after it.
        gathers_root = getattr(module, "automatic_optimization", True)
        if not gathers_root:
            blocks += [layer for layer in outermost_layers(module) if layer not in blocks]
        parked = unpark_shards(module, self._layout_of_shards)
        if self._has_no_values:
            discard_parameters(module)  # of a new process: the others have none to send
        self._take_first_values(module)
        computed, foreign = self._divide_layers()
        self._sharded = ShardedModule(computed, sharding, blocks, gathers_root=gathers_root)
        shards_on = torch.device("cpu") if isinstance(sharding.offload_policy, CPUOffloadPolicy) else self.root_device
        materialize(
            self._sharded.root,
            shards_on,
            parked or {},
            computes_parameters=not self._has_no_values,
            full_module=module,
            foreign=foreign if parked is None else (),  # those that a run has parked have their buffers
        )
        internals.move(module.buffers(), self.root_device)  # those that were on the meta device
        self._has_no_values = False
        self._sharded.guard_shards()
        read_full_values()
        draw_full_values()
        make_plain_tensors()
        self.model = self._sharded.root

    def discard_values(self) -> None:
        discard_shards(self.module)
        self._has_no_values = True

    def _take_first_values(self, module: Module) -> None:
        """Overwrite the values of all ranks by those of rank 0, before each keeps its shards only."""
        for submodule in module.modules():
            buffers = [buffer for buffer in submodule.buffers(recurse=False) if not buffer.is_meta]
            internals.move(buffers, self.root_device)
            parameters = list(submodule.parameters(recurse=False))
            plain = [tensor for tensor in parameters if not isinstance(tensor, DTensor) and not tensor.is_meta]
            # Back to where they were: the full module may not fit on the device, and torch moves a layer to it when
            # it shards the layer.
            on_device = [tensor.detach().to(self.root_device) for tensor in plain]
            broadcast_tensors([*buffers, *on_device])
            for tensor, value in zip(plain, on_device, strict=True):
                if tensor.device != value.device and not self.is_global_zero:  # whose values they are
                    tensor.data = value.to(tensor.device)
            self._take_first_shards([tensor for tensor in parameters if isinstance(tensor, DTensor)])

    def _take_first_shards(self, split: Sequence[DTensor]) -> None:
        """Overwrite tensor-parallel shards by those of the first rank that has the same shard."""

    def setup(self, trainer: TrainerLike) -> None:
        if trainer.is_fitting:
            check_hooks(self.module, type(self).__name__)
        self._attributes = parameter_attributes(self.module)
        super().setup(trainer)
        self._restore_attributes()

    def _restore_attributes(self) -> None:
        """Let the shards have the attributes that the user's parameters had."""
        restore_attributes(self._attributes)
        self._attributes = {}

    @override
    def check_training(self, training: TrainingSize) -> None:
        if training.world_size > 1:
            check_optimizer_classes(training.optimizers, type(self).__name__)

    def setup_optimizers(self, trainer: TrainerLike) -> None:
        self._restore_attributes()  # which configure_optimizers may read
        super().setup_optimizers(trainer)
        check_optimizers(self.optimizers, self.module)
        for optimizer in self.optimizers:
            check_layout(optimizer)
        check_gradients(self.module, type(self).__name__)
        if self.world_size > 1:
            check_steps_shards(self.optimizers, type(self).__name__)
        for optimizer in self.optimizers:
            optimizer.zero_grad = self._clearing(optimizer)  # type: ignore[method-assign]  # until the run ends

    def _clearing(self, optimizer: Optimizer) -> Callable[..., None]:
        """Return an optimizer's ``zero_grad`` that also clears gradients that are not reduced yet."""
        zero_grad, sharded = optimizer.zero_grad, self._sharded_module

        @functools.wraps(zero_grad)
        def clear(*args: Any, **kwargs: Any) -> None:
            zero_grad(*args, **kwargs)
            sharded.drop_accumulated(optimizer)

        return clear

    def on_exception(self, exception: BaseException) -> None:
        self._failed = True
        # First: to copy a shard waits for the collectives before it on the device, which may never end.
        super().on_exception(exception)
        self._end_sharding()

    def teardown(self) -> None:
        self._end_sharding()
        attributes = {} if self._module is None else parameter_attributes(self._module)
        super().teardown()
        restore_attributes(attributes)  # torch makes new parameters of shards that it moves

    def _end_sharding(self) -> None:
        if self._sharded is not None:
            self._sharded.undo()
            # To gather is collective, and after an error other ranks may be gone.
            if self._state_dict_type == "full" and not self._failed:
                gather_parameters(self.module)
            else:
                layout = self._layout_of_shards
                park_shards(self.module, layout, is_reusable=self._is_reusable, has_failed=self._failed)
            self._sharded = None
            self.model = self.module
        if self._mesh is not None:
            internals.release_mesh(self._mesh)
            self._mesh = None

    def evaluation_context(self) -> AbstractContextManager[Any]:
        statistics = running_statistics(self.module)
        self.broadcast_tensors([buffer for buffer in statistics if not isinstance(buffer, DTensor)])
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
        """Accumulate unsharded gradients without communication, until a backward pass outside of the context."""
        self._sharded_module.set_gradient_sync(False)
        try:
            yield
        finally:
            self._sharded_module.set_gradient_sync(True)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        self._sharded_module.begin_backward()
        with explain_shards():
            super().backward(loss, *args, **kwargs)
        self._sharded_module.end_backward()

    def clip_gradients(self, optimizer: Optimizer, clip_val: float, algorithm: ClipAlgorithm = "norm") -> Tensor | None:
        """Clip the gradients of an optimizer's parameters in place, by their norm over all ranks, or by value."""
        self.unscale_gradients(optimizer)
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if algorithm == "norm":
            return clip_by_norm(parameters, clip_val)
        clip_by_value(parameters, clip_val)
        return None

    # State: of the layers that this rank computes; the parameters of others are on the meta device

    def sharded_module_state(self) -> dict[str, Any]:
        """Return the state of the module by its own names; parameters are DTensors of this rank's shards."""
        self._leave_step()
        self._share_buffers()
        return _without_meta(self.module.state_dict())

    def local_weights(self) -> dict[str, Any]:
        """Return parameters and buffers by name; parameters are DTensors of this rank's shards; collective."""
        self._leave_step()
        self._share_buffers()
        return _without_meta(named_weights(self.module))

    def _share_buffers(self) -> None:
        """Overwrite the buffers of layers that other ranks compute by theirs; collective."""

    def _leave_step(self) -> None:
        """Let the module have its shards, and buffers in their original dtype, until the next step."""
        if self._sharded is not None:
            self._sharded.free()
            self._sharded.leave_low_precision()

    def sharded_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of an optimizer by the names of its parameters, of those that this rank computes."""
        named = super().sharded_optimizer_state(optimizer)
        foreign = {name for name, parameter in canonical_parameters(self.module).items() if parameter.is_meta}
        # Adagrad makes its state in the constructor, of all parameters.
        return {**named, "state": {name: state for name, state in named["state"].items() if name not in foreign}}

    def optimizer_template(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state that a step would create, with empty tensors."""
        state, groups = optimizer.state, [group["params"] for group in optimizer.param_groups]
        foreign = {id(parameter) for parameters in groups for parameter in parameters if parameter.is_meta}
        optimizer.state = defaultdict(dict)  # which torch fills by a step that changes nothing else
        for group in optimizer.param_groups:
            group["params"] = [parameter for parameter in group["params"] if id(parameter) not in foreign]
        try:
            template = self._state_after_a_step(optimizer)
        finally:
            optimizer.state = state
            for group, parameters in zip(optimizer.param_groups, groups, strict=True):
                group["params"] = parameters
        names = [name for name, one in canonical_parameters(self.module).items() if id(one) in foreign]
        return {**template, "state": OptionalTensors({**template["state"], **dict.fromkeys(names)})}

    @torch.no_grad()
    def _state_after_a_step(self, optimizer: Optimizer) -> dict[str, Any]:
        """Step an optimizer without state by gradients of zero; its weights stay as they are."""
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

        # torch steps with a rate of 0, and its own optimizers change no weights then.
        keeps_weights = type(optimizer).__module__.startswith("torch.optim.")
        parameters = [one for group in optimizer.param_groups for one in group["params"] if one.requires_grad]
        weights = [] if keeps_weights else [parameter.detach().clone() for parameter in parameters]
        rates = [group.get("lr") for group in optimizer.param_groups]
        try:
            return get_optimizer_state_dict(self.module, optimizer)
        except ZeroDivisionError:  # the optimizer divides by its rate
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad()
            return get_optimizer_state_dict(self.module, optimizer)
        finally:
            for parameter, weight in zip(parameters, weights, strict=False):
                parameter.copy_(weight)

    def rank_state(self) -> dict[str, Any]:
        """Return the gradients of this rank that are pending for an optimizer step."""
        return {"gradients": self._sharded_module.pending_gradients(), **self._rank_layout}

    def load_rank_state(self, state: Mapping[str, Any]) -> None:
        """Restore the saved gradients, for the next backward pass; collective."""
        # If any rank has gradients, all take part, as to restore them is collective.
        if not self.reduce_boolean_decision(bool(state.get("gradients")), all=False):
            return
        if self.takes_gradients(state):
            self._sharded_module.restore_gradients(state["gradients"])
        elif self.is_global_zero:
            _logger.warning(
                "the checkpoint has gradients that were not cleared when it was saved, with %s: with %s they are "
                "dropped",
                _described({name: state.get(name) for name in self._rank_layout}),
                _described(self._rank_layout),
            )

    def takes_gradients(self, state: Mapping[str, Any]) -> bool:
        """Return whether a state is of the same layout, in which this rank has the same shards."""
        return all(state.get(name) == value for name, value in self._rank_layout.items())


def _described(layout: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in layout.items())


def _without_meta(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if not (isinstance(value, torch.Tensor) and value.is_meta)}
