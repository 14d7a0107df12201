"""Interface of strategies: one way of distributing a training over devices and processes."""

from __future__ import annotations

import inspect
import logging
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeVar

from dstrat.errors import CheckpointError, ConflictError, MisuseError
from dstrat.interfaces.batch import move_to_device
from dstrat.interfaces.checkpoint_io import OptionalTensors
from dstrat.interfaces.retired_members import RetiredMembers
from dstrat.interfaces.state_dict import (
    check_names,
    group_names,
    groups_misfit,
    has_standard_layout,
    is_streamed,
    load_by_names,
    load_named_state,
    name_parameters,
    named_state,
    named_weights,
    number_parameters,
    parameter_names,
)
from dstrat.interfaces.tied_parameters import keep_ties

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from datetime import timedelta
    from pathlib import Path

    import torch
    from torch import Tensor
    from torch.distributed import ReduceOp
    from torch.distributed.device_mesh import DeviceMesh
    from torch.nn import Module
    from torch.optim import Optimizer

    from dstrat.interfaces.accelerator import Accelerator
    from dstrat.interfaces.checkpoint_io import CheckpointIO
    from dstrat.interfaces.cluster import ClusterEnvironment
    from dstrat.interfaces.communication import CommunicationLayout
    from dstrat.interfaces.launcher import Launcher
    from dstrat.interfaces.memory import MemoryLayout, SavedActivations, Stage, TrainingSize
    from dstrat.interfaces.optimizers import Optimization, SchedulerConfig
    from dstrat.interfaces.precision import ClipAlgorithm, Precision


# Components of a strategy, and the protocol of its caller


@dataclass(frozen=True, kw_only=True, slots=True)
class Components:
    """Components of a strategy, by the names that its constructor's arguments have; None for those that it lacks yet.

    The Trainer or ``dstrat.build`` selects each component that the user has not passed.

    Attributes:
        accelerator: The hardware.
        parallel_devices: The devices of this machine that the job uses, one for each local rank.
        cluster_environment: Where the job runs.
        checkpoint_io: How checkpoints reach storage.
        precision_plugin: The precision: dtypes, casts, loss scaling.
        launcher: Starts the processes; None to run in the calling process.  Constructors have no such argument.
    """

    accelerator: Accelerator | None = None
    parallel_devices: tuple[torch.device, ...] | None = None
    cluster_environment: ClusterEnvironment | None = None
    checkpoint_io: CheckpointIO | None = None
    precision_plugin: Precision | None = None
    launcher: Launcher | None = None

    def __post_init__(self) -> None:
        if self.parallel_devices is None:
            return
        import torch

        devices: tuple[Any, ...] = tuple(self.parallel_devices)
        if all(isinstance(device, str | torch.device) for device in devices):  # others are refused with the hardware
            # With their indices, as tensors on them have one; "cuda" is the first one of its type.
            devices = tuple(
                device if device.type in ("cpu", "meta") or device.index is not None else torch.device(device.type, 0)
                for device in map(torch.device, devices)
            )
        object.__setattr__(self, "parallel_devices", devices)


Parts = Components  # its first name


class TrainerLike(Protocol):
    """Protocol of the caller of a strategy's ``setup``: the Trainer, or a hand-written loop."""

    @property
    def is_fitting(self) -> bool:
        """Whether the module is going to be trained, which needs gradients and optimizers."""

    @property
    def accumulate_grad_batches(self) -> int:
        """Number of batches whose gradients are summed before an optimizer step."""

    @property
    def gradient_clip_val(self) -> float | None:
        """Largest norm or value of gradients; None does not clip."""

    @property
    def gradient_clip_algorithm(self) -> ClipAlgorithm:
        """How gradients are clipped."""

    def configure_optimizers(self) -> Optimization:
        """Create the optimizers of the module in its present state, on its device, and their schedulers."""


class RunningTraining(Protocol):
    """Protocol of the training of this process, whose state a strategy exchanges with other jobs."""

    def capture(self) -> dict[str, Any]:
        """Return the state: module, optimizers, schedulers, counters, the order of the data, callbacks.

        Tensors are the training's own, not copies.  It may be called in another thread during a backward pass.
        """

    def restore(self, state: Mapping[str, Any]) -> None:
        """Load a state of another job, before the first batch; training resumes at its batch."""


# Compiled training steps: forward and backward passes and optimizer steps in one call


@dataclass(frozen=True, kw_only=True, slots=True)
class CompiledSteps:
    """Number of batches and optimizer steps in one call of ``training_step``, if the backend compiles these together.

    Attributes:
        batches: Number of batches that the call consumes, at least 1; an item of the loader that
            ``process_dataloader`` returned has as many.  Epochs, limits and intervals count these batches.
        optimizer_steps: Number of optimizer steps in the call, each after as many batches as the Trainer's
            ``accumulate_grad_batches``; 0 if the call runs the forward and backward passes of one batch only, which
            alternate in a pipeline.
        clips_gradients: Whether the call clips gradients as the Trainer's ``gradient_clip_val`` says.
    """

    batches: int = 1
    optimizer_steps: int = 1
    clips_gradients: bool = False


StepName = Literal["training_step", "validation_step", "test_step", "predict_step"]

T = TypeVar("T")

_logger = logging.getLogger(__name__)


# Members of Lightning's strategies, and what to do instead.
_RETIRED = {
    "pre_backward": "override backward",
    "post_backward": "override backward",
    "post_training_step": "override training_step",
    "block_backward_sync": "it is no_backward_sync",
    "handles_gradient_accumulation": "it is accumulates_gradients",
    "lightning_module": "it is module",
    "lightning_module_state_dict": "it is module_state_dict",
    "load_model_state_dict": "it is load_module_state_dict, which takes the state of the module",
    "load_optimizer_state_dict": "it is load_optimizer_state, which is called for each optimizer",
    "lightning_restore_optimizer": "checkpoints are always loaded with what they have of optimizers",
    "restore_checkpoint_after_setup": "checkpoints are always loaded after setup",
    "register_strategies": "aliases are registered by an entry point, or with StrategyRegistry.register",
    "setup_precision_plugin": "override setup",
    "determine_ddp_device_ids": "override wrap_model",
    "on_train_batch_start": "use that hook of a callback",
    **{
        f"on_{stage}_{moment}": "override setup or teardown, or use that hook of a callback"
        for stage in ("train", "validation", "test", "predict")
        for moment in ("start", "end")
    },
}

# Methods that packages may override by the first name that they had.
_FIRST_NAMES = {"receive": "set_components", "take_from_first_rank": "broadcast_tensors"}


def _renamed(name: str) -> Any:
    """Return a property with the value of an attribute that has another name now."""
    return property(lambda self: getattr(self, name), lambda self, value: setattr(self, name, value))


class Strategy(RetiredMembers, ABC):
    """One way of distributing training, evaluation and prediction.

    A strategy is composed of an accelerator, a precision plugin and a checkpoint io.  It launches and ends processes,
    opens communication, owns the module and its optimizers, and runs the steps.  Its caller calls, in this order:
    :meth:`set_components` and :meth:`connect`; ``launcher.launch`` if there is a launcher; then in each process
    :meth:`setup_environment`, :meth:`setup`, the steps, and :meth:`teardown` (after an error, :meth:`on_exception`
    before it).  After each :meth:`backward`, :meth:`optimizer_step` and evaluation step the caller calls ``end_graph``
    of the accelerator, which some hardware needs.

    Every process calls each method that is *collective*, in the same order, so that it may communicate; a process may
    call any other method by itself.  The methods that are not abstract fit one device.  The smallest complete subclass,
    of all that must be overridden::

        class MyStrategy(Strategy):
            root_device = property(lambda self: torch.device("cpu"))
            is_global_zero = True

            def model_to_device(self):
                self.module.to(self.root_device)

            def reduce(self, tensor, group=None, reduce_op="mean"):
                return tensor

            def broadcast(self, obj, src=0):
                return obj

            def barrier(self, name=None):
                pass

            def all_gather(self, tensor, group=None, sync_grads=False):
                return tensor.unsqueeze(0)

    The arguments of the constructor are components, see :class:`Components`.

    Attributes:
        start_method: Start method of the processes of this machine; None if the strategy starts none.
        uses_torch_distributed: Whether its processes communicate through torch.distributed, which the accelerator must
            support then.
        drives_several_devices: Whether one process drives several devices, if the strategy starts none.
        accumulates_gradients: Whether the backend decides when accumulated gradients are applied; then
            :meth:`optimizer_step` is called for each batch.
        replicates_state: Whether each process holds the full state of the module and its optimizers, so that one can
            write it without the others.
        saves_full_state: Whether checkpoints have full tensors although processes have shards, which a single file can
            have then.
        saves_gradients: Whether :meth:`rank_state` has the gradients that are pending for an optimizer step, as the
            value of ``"gradients"``, which is empty if there are none.
        allows_new_optimizers: Whether :attr:`optimizers` may be set during a training.  Then :meth:`setup_optimizers`
            is called again, with these.
        evaluates_together: Whether evaluation steps communicate, so that every process must run as many.
        allows_inference_mode: Whether evaluation may run under ``torch.inference_mode``; otherwise ``no_grad``.
        timeout: How long a process waits for the others; None if there are none.
        hang_timeout: How long a process may be idle in a run before the job ends; None for any time.
        reaches_other_jobs: Whether its processes communicate with those of other jobs, also on other machines.
            Otherwise a job of one machine communicates on the loopback only.
        steps_with_other_jobs: Whether other jobs train the same module, and wait for this one in their steps: each has
            to take every step, with a gradient of its own.
        trains_apart: Whether processes train weights of their own for some time, which loops of other libraries do not
            expect.  The module's state should be the mean then, which the module has in :meth:`evaluation_context`, and
            :meth:`rank_state` have those of each process.
        compares_replicas: Whether processes compare the parameters that all of them have, in a few steps: those of a
            strategy that keeps them equal by synchronizing gradients.
        saved_activations: How layers of the module save activations in a training; None for all of them, as they are.
        components: The components; None for those that it lacks yet.
        constructor_components: Those that were passed to the constructor, some as an alias or a class.
        optimizers: The optimizers, after :meth:`setup` of a training.
        lr_schedulers: Their schedulers.
        module_backward: Function of the module that computes gradients of a (scaled) loss; None if it has none.
        weigh_batch: Function of the weight of a batch, a scalar, that returns the factor of its loss; set by the caller
            where :meth:`compiled_steps` has ``optimizer_steps=0``.
        step_methods: Object whose methods are the steps, instead of the module's; None for those of the module.  In a
            hand-written loop, whose steps are functions, each of its methods calls its first argument.
    """

    retired_members: ClassVar[Mapping[str, str]] = _RETIRED
    start_method: str | None = None
    uses_torch_distributed: bool = False
    drives_several_devices: bool = False
    accumulates_gradients: bool = False
    replicates_state: bool = True
    saves_full_state: bool = False
    saves_gradients: bool = False
    allows_new_optimizers: bool = True
    evaluates_together: bool = False
    allows_inference_mode: bool = True
    timeout: timedelta | None = None
    hang_timeout: timedelta | None = None
    reaches_other_jobs: bool = False
    steps_with_other_jobs: bool = False
    trains_apart: bool = False
    compares_replicas: bool = False
    saved_activations: SavedActivations | None = None
    _restore_layers: Callable[[], None] | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for first_name, name in _FIRST_NAMES.items():  # a class overrides both, whichever it defines
            for defined, other in ((first_name, name), (name, first_name)):
                if defined in cls.__dict__ and other not in cls.__dict__:
                    setattr(cls, other, cls.__dict__[defined])
        # Here, as otherwise a user of the class would see a TypeError in the first step.
        _check_signature(cls, "backward", "loss, *args, **kwargs")
        _check_signature(cls, "batch_to_device", "batch")

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        self.constructor_components = Components()
        self.add_components(accelerator=accelerator, checkpoint_io=checkpoint_io, precision_plugin=precision_plugin)
        self.optimizers: list[Optimizer] = []
        self.lr_schedulers: list[SchedulerConfig] = []
        self.module_backward: Callable[..., None] | None = None
        self.weigh_batch: Callable[[Tensor], Tensor] | None = None
        self.step_methods: Any = None
        self._is_set_up = False
        self._module: Module | None = None
        self.model: Any = None

    # Components

    def add_components(self, **components: Any) -> None:
        """Add components that were passed to the constructor, which calls this; None for one that was not passed."""
        self.constructor_components = self.components = replace(self.constructor_components, **components)
        names = [one.name for one in fields(Components) if isinstance(getattr(self.components, one.name), str | type)]
        if names:  # set_components has objects for these
            self.components = replace(self.components, **dict.fromkeys(names))

    def set_components(self, components: Components) -> None:
        """Set the components that were not passed to the constructor, before any process starts; the others stay.

        For an alias or a class that was passed to the constructor, the instance in ``components`` is used.

        Raises:
            MisuseError: ``components`` has no instance for it.
        """
        from_constructor = {}
        for field in fields(Components):
            value = getattr(self.constructor_components, field.name)
            if isinstance(value, str | type):
                if getattr(components, field.name) is None:
                    raise MisuseError(
                        f"{type(self).__name__}({field.name}={value!r}) needs an instance here: only Trainer and "
                        "dstrat.build construct components from an alias or a class"
                    )
            elif value is not None:
                from_constructor[field.name] = value
        self.components = replace(components, **from_constructor)

    # First names
    receive = set_components
    parts = _renamed("components")
    given_parts = _renamed("constructor_components")

    @property
    def accelerator(self) -> Accelerator:
        """The hardware."""
        return self._present(self.components.accelerator, "accelerator")

    @property
    def precision_plugin(self) -> Precision:
        """The precision: dtypes, casts, loss scaling."""
        return self._present(self.components.precision_plugin, "precision plugin")

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """How checkpoints reach storage."""
        return self._present(self.components.checkpoint_io, "checkpoint io")

    @property
    def is_distributed(self) -> bool:
        """Whether its processes communicate through torch.distributed, by Lightning's name."""
        return self.uses_torch_distributed

    @property
    def launcher(self) -> Launcher | None:
        """The launcher of the processes; None if everything runs in this one.

        It follows from the plan; a strategy with another launcher overrides this property.
        """
        return self.components.launcher

    def precision_for(self, flag: str) -> Precision | None:  # most strategies have none of their own
        """Return this strategy's precision for a flag; None to use the accelerator's."""
        return None

    def forward_dtype(self, precision: Precision) -> torch.dtype:
        """Return the dtype that parameters have in a forward pass: by default that in which they are kept.

        A strategy that gathers parameters in the dtype of the computation overrides it.  Autocast makes no copies of
        them then, which estimates count as activations otherwise.

        Args:
            precision: The dtypes of the training.
        """
        return precision.param_dtype

    def memory_layout(self, training: TrainingSize) -> MemoryLayout | None:
        """Return the memory of a rank besides activations, before anything runs; None where it is not known.

        By default a rank holds everything, unless :attr:`replicates_state` is False.  A strategy that divides or
        offloads something overrides it, and starts from ``training.replicated``.  Only options of the constructor are
        known: there are no devices and no processes.

        Args:
            training: Sizes of the training on one device, and the ranks that are to share it.
        """
        return training.replicated if self.replicates_state else None

    def communication_layout(self, training: TrainingSize) -> CommunicationLayout | None:
        """Return what a rank communicates in an optimizer step, before anything runs; None where it is not known.

        It is the sibling of :meth:`memory_layout`, and knows as little: options of the constructor only.  What takes a
        few bytes, such as the norm of gradients, is left out, and so is what follows from the module's own calls.

        Args:
            training: Sizes of the training on one device, and the ranks that are to share it.
        """
        return None

    def stages(self, training: TrainingSize) -> Sequence[Stage]:
        """Return the layers of the ranks, where they have different ones; empty where each rank has all layers.

        :meth:`memory_layout` is that of stages with equal layers.  ``dstrat explain`` shows the memory of each stage,
        and ``dstrat choose`` takes the largest.

        Args:
            training: Sizes of the training on one device, and the ranks that are to share it.

        Raises:
            DstratError: The layers cannot be divided so.
        """
        return ()

    @classmethod
    def layout_options(cls, module: Module, world_size: int, ranks_per_machine: int) -> Sequence[Mapping[str, Any]]:
        """Return options of the constructor for each layout that is worth comparing, for ``dstrat choose``.

        Args:
            module: The module to train, whose parameters have shapes and no values.
            world_size: Number of processes of the job.
            ranks_per_machine: Number of processes on each machine.
        """
        return ({},)

    @classmethod
    def similar_options(cls, options: Mapping[str, Any], module: Module) -> Sequence[Mapping[str, Any]]:
        """Return options that are worth comparing where some of :meth:`layout_options` are among the fastest.

        So a strategy need not return all combinations there.

        Args:
            options: The options.
            module: The module to train, whose parameters have shapes and no values.
        """
        return ()

    def check_training(self, training: TrainingSize) -> None:
        """Check that the module can be trained with the options, before anything runs.

        Args:
            training: Sizes of the training on one device, and the ranks that are to share it.

        Raises:
            DstratError: It cannot; the message says why and what to do.
        """

    def describe_layout(self, world_size: int, ranks_per_machine: int) -> Sequence[tuple[str, str, str]]:
        """Return further rows of the plan: a subject, its value and the reason, such as the groups of processes.

        Only options of the constructor are known: there are no devices and no processes.

        Args:
            world_size: Number of processes of the job.
            ranks_per_machine: Number of processes on each machine.

        Raises:
            RequestError: The options do not fit the number of processes.
        """
        return ()

    # Rank and device of this process

    @property
    @abstractmethod
    def root_device(self) -> torch.device:
        """The device of this process, by its name in the process; on it are the module, batches and collectives."""

    @property
    def assigned_device(self) -> torch.device:
        """The planned device of this process, by the machine's index; in the process it is :attr:`root_device`."""
        return self.root_device

    @property
    def driven_devices(self) -> tuple[torch.device, ...]:
        """The devices that this process computes on."""
        return (self.root_device,)

    def get_random_state(self) -> Tensor | None:
        """Return the state of the random number generators of this process's devices; None if they have none.

        It is a uint8 tensor on the CPU with a row for each device, and of one device that row alone.
        """
        import torch

        states = [self.accelerator.get_random_state(device) for device in self.driven_devices]
        present = [state for state in states if state is not None]
        return torch.stack(present) if len(present) > 1 else next(iter(present), None)

    def set_random_state(self, state: Tensor) -> None:
        """Set a state that :meth:`get_random_state` returned; devices that it has no row for go on as they are."""
        states = [row.clone() for row in state] if state.dim() == 2 else [state]
        for device, of_device in zip(self.driven_devices, states, strict=False):
            self.accelerator.set_random_state(device, of_device)

    def share_random_state(self) -> None:
        """Let processes that read the same data draw the same random numbers from now on; collective.

        Loops call it before the first batch of an epoch.
        """

    @property
    @abstractmethod
    def is_global_zero(self) -> bool:
        """Whether this process has global rank 0."""

    @property
    def world_size(self) -> int:
        """Number of processes of the job."""
        return 1

    @property
    def global_rank(self) -> int:
        """Rank of this process in the job."""
        return 0

    @property
    def local_rank(self) -> int:
        """Rank of this process on its machine."""
        return 0

    @property
    def node_rank(self) -> int:
        """Rank of this machine."""
        return 0

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """``num_replicas`` and ``rank`` for a sampler; empty when every process reads all of the data."""
        return {}

    @property
    def training_sampler_kwargs(self) -> dict[str, int]:
        """``num_replicas`` and ``rank`` for a sampler of training data; by default as for evaluation.

        They differ where several jobs train on one data set together, and each evaluates by itself.
        """
        return self.distributed_sampler_kwargs

    @property
    def replicas_per_process(self) -> int:
        """Number of batches of a loader that this process joins to one batch: one for each replica of the module.

        It is 1 for a strategy that splits a batch of the loader among its devices.
        """
        return 1

    @property
    def first_reader(self) -> int:
        """Global rank of the first process of those that read the same data as this one; only its values are used."""
        return self.global_rank

    @property
    def is_first_reader(self) -> bool:
        """Whether this process is the first of those that read the same data."""
        return self.first_reader == self.global_rank

    # The module

    def connect(self, module: Module) -> None:
        """Set the user's module, which is not yet moved or wrapped; called before processes are launched."""
        self._module = module
        self.model = module
        self.step_methods = self.weigh_batch = None  # and below: of an earlier run
        self._is_set_up = False

    @property
    def module(self) -> Any:
        """The user's module, never wrapped; :attr:`model` is the wrapped one."""
        return self._present(self._module, "module")

    @abstractmethod
    def model_to_device(self) -> None:
        """Move the module to :attr:`root_device`; called by :meth:`setup`."""

    def tensor_init_context(self) -> AbstractContextManager[Any]:
        """Return the context, around ``configure_model``, in which new tensors have the precision's dtype."""
        return self.precision_plugin.tensor_init_context()

    def model_sharded_context(self) -> AbstractContextManager[Any]:
        """Return the context, around ``configure_model``, in which layers are sharded from the start; collective."""
        return nullcontext()

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh of processes that the module is sharded or parallelized over.

        Raises:
            MisuseError: This strategy has none.
        """
        raise MisuseError(f"{type(self).__name__} has no device mesh: it does not shard the module")

    # The life cycle

    def setup_environment(self) -> None:
        """Prepare the device and open communication, before any hook of the module runs; collective."""
        self.accelerator.setup(self.assigned_device)

    def setup(self, trainer: TrainerLike) -> None:
        """Prepare the module, in this order: precision, device, wrapping, optimizers; collective."""
        self._is_set_up = True
        self._module = self.model = self.precision_plugin.connect(self.module)
        self.model_to_device()
        replace_forwards = None
        if self.saved_activations is not None and trainer.is_fitting:  # wrapping may change the classes of layers
            has_streams = self.accelerator.has_streams
            replace_forwards = self.saved_activations.select(self.module, self.root_device, has_streams=has_streams)
        self.wrap_model(trainer)
        if replace_forwards is not None:  # around a forward that wrapping has replaced
            self._restore_layers = replace_forwards()
        if trainer.is_fitting:
            self.setup_optimizers(trainer)  # last, as the steps before may replace parameters

    def check_set_up(self) -> None:
        """Check that :meth:`setup` of a training has created optimizers, or has called its base.

        Raises:
            MisuseError: A subclass overrides it, and does neither.
        """
        if not self._is_set_up and not self.optimizers:
            raise MisuseError(
                f"{type(self).__name__}.setup did not call super().setup(trainer), so that the module was not prepared "
                "and has no optimizers: call it there"
            )

    def synchronize_batchnorm(self) -> None:
        """Let batch-norm layers of the module compute statistics over all processes; called before :meth:`setup`."""

    def wrap_model(self, trainer: TrainerLike) -> None:
        """Set :attr:`model` to a wrapper of the module that synchronizes or shards it; collective.

        The module is on its device and has its dtype.  There are no optimizers yet, so parameters may be replaced.
        """

    def setup_optimizers(self, trainer: TrainerLike) -> None:
        """Create the optimizers and schedulers, of the parameters that :meth:`wrap_model` has left."""
        optimization = trainer.configure_optimizers()
        self.optimizers = list(optimization.optimizers)
        self.lr_schedulers = list(optimization.schedulers)

    def join_training(self, training: RunningTraining) -> None:
        """Take over the state of other jobs that train together with this one, before the first batch of a fit.

        A Trainer calls it after the setup, and after a checkpoint was restored; by default there are no other jobs.

        Args:
            training: Captures and restores the state of this process.
        """

    def on_exception(self, exception: BaseException) -> None:
        """Release everything for which peers would wait; called after an error, before :meth:`teardown`.

        It must not communicate: other processes may have ended, or may still be at work.
        """

    def teardown(self) -> None:
        """Unwrap the module, move it to the CPU and close communication.

        It is called at the end of every run, also after an error in any of the methods before it.
        """
        self.optimizers, self.lr_schedulers = [], []
        self._restore_activations()
        with ExitStack() as stack:  # each of them, also where nothing can be copied from a device after its error
            for component in (self.checkpoint_io, self.accelerator, self.precision_plugin):  # the last one first
                stack.callback(component.teardown)
            if self._module is not None:
                # As cpu() does; after an error a layer may be on the meta device, without memory.
                with keep_ties(self._module):
                    self.model = self._module._apply(lambda tensor: tensor if tensor.is_meta else tensor.cpu())  # noqa: SLF001 - its public callers fail for those

    def _restore_activations(self) -> None:
        """Let layers save activations as they did before the training."""
        restore, self._restore_layers = self._restore_layers, None
        if restore is not None:
            restore()

    def check_elastic(self) -> None:
        """Check that a training can go on in the processes of the ranks that remain, when one was killed.

        A strategy that allows it overrides this, ends its communication without its peers in :meth:`on_exception`, and
        can be set up again after :meth:`teardown`, for fewer processes.

        Raises:
            ConflictError: It cannot; the message says why.
        """
        raise ConflictError(
            f"elastic goes on in the same processes when a rank was killed, and {type(self).__name__} cannot be "
            "set up again in them for fewer ranks: leave elastic out, and max_restarts restarts all ranks"
        )

    def discard_values(self) -> None:
        """Let the module have parameters without values, until a checkpoint is loaded.

        It is called, after :meth:`teardown`, where the process goes on as a rank of another group, for which shards
        have another size, and before :meth:`setup` in a new process that joins such a group.
        """

    def finish_training(self) -> None:
        """Synchronize processes that train independently; called after the last step; collective."""

    # Steps

    def process_dataloader(self, dataloader: Any) -> Any:
        """Return the loader of this process, from one whose data is divided already; a backend may have its own."""
        return dataloader

    def process_evaluation_dataloader(self, dataloader: Any) -> Any:
        """Return the loader of this process for validation, test or prediction; by default as for training."""
        return self.process_dataloader(dataloader)

    def evaluation_batches_per_item(self) -> int:
        """Return the number of batches in an item of a loader of :meth:`process_evaluation_dataloader`.

        It is more than 1 if one call of a compiled step consumes several; known from :meth:`setup` on.  Limits,
        indices and progress count these batches, and hooks around a batch are called once for all of them.
        """
        return 1

    def compiled_steps(self) -> CompiledSteps | None:
        """Return the contents of one call of :meth:`training_step` if it is more than a forward pass, or None.

        With ``optimizer_steps=0`` the call adds the gradients of its batch to those of the parameters, and returns the
        loss; the caller does everything else as usual.  It does not divide the loss of accumulated batches, and scales
        their gradients before the step.  If the loss has a weight, the call multiplies it by the factor that
        :attr:`weigh_batch` returns for that, and returns ``{"loss": loss, "weight": weight}``.

        A backend that compiles full training steps overrides it; the result is known from the beginning of
        :meth:`setup` on.  The caller then calls :meth:`training_step` only: neither :meth:`backward` nor
        :meth:`clip_gradients` nor :meth:`optimizer_step`.  ``training_step`` returns the outputs of the module's step,
        of all batches; values that the module logs while it is traced are collected by ``capture_logs`` of
        :class:`~dstrat.TrainModule`.
        """
        return None

    def prefetch(self, items: Iterable[T], move: Callable[[T], T]) -> Iterator[T]:
        """Yield the items after ``move``, while threads read and move the next ones.

        A backend with its own loader overrides it; by default each item is read and moved when it is needed.  It is
        called only if other processes load the batches (``num_workers``) and no hook takes part in the transfer:
        otherwise loading draws random numbers in this process, and their order must not depend on threads.

        Args:
            items: Batches on the host, with data of the caller.
            move: Returns an item with its batch on the device, as :meth:`batch_to_device` does.
        """
        return map(move, items)

    @property
    def prefetches(self) -> bool:
        """Whether :meth:`prefetch` reads in threads, rather than being the default."""
        return type(self).prefetch is not Strategy.prefetch

    @property
    def copies_ahead(self) -> bool:
        """Whether the next batch can be copied during a step: by streams, and by dstrat's :meth:`batch_to_device`."""
        # Another transfer may rely on the stream or on the order of calls.
        return self.accelerator.has_streams and type(self).batch_to_device is Strategy.batch_to_device

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Return the batch on a device, by default :attr:`root_device`, with floats in the precision's dtype."""
        accelerator = self.components.accelerator  # None in a strategy that is used by itself, on the CPU
        non_blocking = accelerator is not None and accelerator.has_streams
        moved = move_to_device(batch, device or self.root_device, non_blocking=non_blocking)
        return self.precision_plugin.convert_input(moved)

    def run_step(self, name: StepName, step: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run a step of the module in the precision; the four methods of steps call it, each for its step.

        A strategy that wraps the module, or does something around every step, overrides this one method.  The loops
        of a Trainer call it directly where ``training_step`` (``validation_step`` ...) is not overridden::

            def run_step(self, name, step, /, *args, **kwargs):
                with self.precision_plugin.forward_context():
                    return self.model(step, *args, **kwargs)  # whose forward calls step(*args, **kwargs)

        Args:
            name: Which step; gradients are computed after, or within, ``"training_step"`` alone.
            step: The module's method of that name, or in a hand-written loop a function.
            *args: Arguments of the step, the batch first.
            **kwargs: Keyword arguments of the step.

        Returns:
            The result of the step.
        """
        with self.precision_plugin.forward_context():
            return step(*args, **kwargs)

    def module_step(self, name: StepName) -> Callable[..., Any]:
        """Return the function of a step: the module's method, or that of a hand-written loop."""
        owner: Any = self.step_methods
        if owner is None:
            # The property is called only to raise its error; calling it in each step would cost time.
            owner = self.module if self._module is None else self._module
        step: Callable[..., Any] = getattr(owner, name)
        return step

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's ``training_step``."""
        return self.run_step("training_step", self.module_step("training_step"), *args, **kwargs)

    def evaluation_context(self) -> AbstractContextManager[Any]:
        """Return the context of a validation, test or prediction with its hooks; entering it is collective.

        Within it the module has the weights to evaluate, if processes train different ones for some time.
        """
        return nullcontext()

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's ``validation_step``."""
        return self.run_step("validation_step", self.module_step("validation_step"), *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's ``test_step``."""
        return self.run_step("test_step", self.module_step("test_step"), *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's ``predict_step``."""
        return self.run_step("predict_step", self.module_step("predict_step"), *args, **kwargs)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Compute gradients of a loss (a scalar tensor), by :attr:`module_backward` if the module has one; collective.

        A strategy that synchronizes gradients leaves their means over the processes, unless in
        :meth:`no_backward_sync`.
        """
        if self.module_backward is None:
            self.precision_plugin.backward(loss, *args, **kwargs)
        else:
            self.module_backward(self.precision_plugin.scale_loss(loss), *args, **kwargs)

    def no_backward_sync(self) -> AbstractContextManager[Any]:
        """Return a context in which gradients accumulate in this process without being synchronized.

        It is around the forward and backward passes of all batches of an optimizer step but the last.
        """
        return nullcontext()

    @property
    def weighs_losses(self) -> bool:
        """Whether losses may have weights: the gradients of each step are the mean over processes, and can be scaled.

        See :meth:`mean_weight` and :meth:`scale_gradients`.  A strategy that averages something else, or not in each
        step, returns False.
        """
        return True

    def mean_weight(self, weight: Tensor) -> Tensor:
        """Return the mean of a weight over the processes among which gradients are averaged; collective.

        It is called in steps whose losses have weights: ``training_step`` returned ``{"loss": loss, "weight": n}``.

        Args:
            weight: The weight of the losses of this process, a scalar in float32 on :attr:`root_device`; processes that
                read the same data have the same.
        """
        mean: Tensor = self.reduce(weight, reduce_op="mean")
        return mean

    def scale_gradients(self, optimizer: Optimizer, factor: float | Tensor) -> None:
        """Multiply the accumulated gradients of an optimizer's parameters, before hooks and clipping read them.

        It follows the last backward pass of an optimizer step, if the gradients are of fewer batches than expected, or
        of several batches whose losses have weights.  The factor is the same in every process.  With
        :attr:`steps_with_other_jobs` it may precede that pass, for the gradients of the earlier batches of this job.

        Args:
            optimizer: The optimizer.
            factor: A positive number, or a scalar tensor on :attr:`root_device`, whose value is not read.
        """
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    # A gradient may be offloaded to the host.
                    parameter.grad.mul_(factor if isinstance(factor, int | float) else factor.to(parameter.grad.device))

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        """Undo a loss scale in the gradients, before hooks and clipping read them."""
        self.precision_plugin.unscale_gradients(optimizer)

    def clip_gradients(self, optimizer: Optimizer, clip_val: float, algorithm: ClipAlgorithm = "norm") -> Tensor | None:
        """Clip the unscaled gradients of an optimizer's parameters in place; collective.

        Args:
            optimizer: The optimizer.
            clip_val: The largest norm, of the full gradients and not of a shard, or the largest absolute value.
            algorithm: Which of the two.

        Returns:
            The norm before, of a strategy that computes it by itself; otherwise None.
        """
        self.precision_plugin.clip_gradients(optimizer, clip_val, algorithm)
        return None

    def share_gradient_norms(self, norms: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return norms of gradients by name, also those that only other ranks have; collective.

        ``grad_norm`` calls it where this rank has parameters on the meta device.

        Args:
            norms: Norms of the gradients that this rank has, by the names of parameters of the module.
        """
        return dict(norms)

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: Module | None = None,  # for strategies whose engine steps the model
        **kwargs: Any,
    ) -> Any:
        """Run the closure, which computes loss and gradients, and step the optimizer; collective.

        Args:
            optimizer: One of :attr:`optimizers`.
            closure: Runs :meth:`training_step`, :meth:`backward`, :meth:`unscale_gradients` and :meth:`clip_gradients`.
            model: The user's module.
            **kwargs: Passed to the optimizer's ``step``.

        Returns:
            The result of the closure.
        """
        return self.precision_plugin.optimizer_step(optimizer, closure, **kwargs)

    # Communication

    @abstractmethod
    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: str | ReduceOp | None = "mean") -> Any:
        """Return the tensor reduced over all processes, without changing it; collective.

        Args:
            tensor: A tensor of the same shape and dtype on every process, on :attr:`root_device`; other objects are
                returned unchanged.  A strategy over torch.distributed takes tensors of the host too.
            group: The processes to reduce over; None for all.
            reduce_op: ``"mean"`` (or ``"avg"``), ``"sum"``, ``"max"``, ``"min"``, or torch's; None for the mean.  A
                strategy over torch.distributed supports all of its operations.
        """

    @abstractmethod
    def broadcast(self, obj: T, src: int = 0) -> T:
        """Return the object of the source rank, which is pickled, on every process; collective."""

    @abstractmethod
    def barrier(self, name: str | None = None) -> None:
        """Wait until every process has called this; collective.  The name is for error messages."""

    @abstractmethod
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """Return the tensors of all processes, stacked: ``(*shape)`` becomes ``(world_size, *shape)``; collective.

        Of processes that read the same data, as ``num_replicas`` of :attr:`distributed_sampler_kwargs` says, one
        counts, so that each sample comes once: the shape is ``(num_replicas, *shape)``, in the order of the data.

        Args:
            tensor: A tensor of the same shape and dtype on every process, on :attr:`root_device`.
            group: The processes to gather from, which all count; None for all.
            sync_grads: Whether gradients flow back: each process gets the sum of those of its tensor.
        """

    def gather_from_processes(self, tensor: Tensor, group: Any | None = None) -> Tensor:
        """Return the tensors of all processes, stacked, also of those that read the same data; collective.

        It is for values of processes, such as their memory, and :meth:`all_gather` for those of samples.

        Args:
            tensor: A tensor of the same shape and dtype on every process, on :attr:`root_device`.
            group: The processes to gather from; None for all.
        """
        return self.all_gather(tensor, group)

    def collectives_begun(self) -> int:
        """Return how many collectives this process has begun; always 0 where that is not counted.

        A Trainer sees from it that an evaluation step communicates.  Ranks with fewer batches than others then repeat
        their last one, without results, so that no rank waits for ever.
        """
        return 0

    def read_values(self, tensors: Sequence[Tensor]) -> list[float]:
        """Return the values of tensors with one element each, on any devices, by one copy from each.

        A backend overrides it if computing on the values before the copy is expensive, as compiling a graph is.
        """
        import torch

        accelerator = self.components.accelerator  # None in a strategy that is used by itself, on the CPU
        has_float64 = accelerator is None or accelerator.supports_dtype(torch.float64)
        # Without float64 one copy for each dtype: no other dtype holds all values of float32 and of the integers.
        groups: dict[tuple[torch.device, torch.dtype], dict[int, Tensor]] = {}
        for index, tensor in enumerate(tensors):
            dtype = torch.float64 if has_float64 else tensor.dtype
            groups.setdefault((tensor.device, dtype), {})[index] = tensor.reshape(())
        values = [0.0] * len(tensors)
        for (_, dtype), same in groups.items():
            # A single one is copied as it is: stacked, it would be one more graph of a lazy device.
            alike = [*same.values()]
            read = torch.stack([tensor.to(dtype) for tensor in alike]).tolist() if len(alike) > 1 else [alike[0].item()]
            for index, value in zip(same, read, strict=True):
                values[index] = float(value)
        return values

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:  # noqa: A002 - the known name
        """Return whether all processes (or any of them) decided for it; collective."""
        import torch

        votes = self.from_host(torch.tensor(int(decision)))
        total = int(self.reduce(votes, reduce_op="sum"))
        return total == self.world_size if all else total > 0

    # State

    def to_host(self, tensor: Tensor) -> Tensor:
        """Return a tensor of this process on the CPU; backends that shard it over several devices override it."""
        return tensor.cpu()

    def from_host(self, tensor: Tensor) -> Tensor:
        """Return a small tensor of the CPU on :attr:`root_device`; the host does not wait where that has streams."""
        accelerator = self.components.accelerator  # None in a strategy that is used by itself, on the CPU
        # Up to 64 KiB of memory that is not pinned are copied by the driver before this returns.
        return tensor.to(self.root_device, non_blocking=accelerator is not None and accelerator.has_streams)

    # Four methods define it, by names, with this process's shards: sharded_module_state, load_sharded_module_state,
    # sharded_optimizer_state and load_sharded_optimizer_state.  Those of the full state follow from them.

    def sharded_module_state(self) -> dict[str, Any]:
        """Return the state of the module under its own names, with this process's shards; collective.

        Tensors that are the same in every process are plain tensors; sharded ones are DTensors or
        :class:`~dstrat.interfaces.checkpoint_io.FlatShard`.
        """
        state: dict[str, Any] = self.module.state_dict()
        return state

    def load_sharded_module_state(self, state: dict[str, Any]) -> None:
        """Load a state of :meth:`sharded_module_state`, after a checkpoint was loaded into its tensors; collective.

        It does nothing if these tensors are the module's own; otherwise it copies them to the device.
        """

    def sharded_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of an optimizer by the names of its parameters, with this process's shards; collective.

        A process that has the state of some parameters only returns their entries.  Of sharded parameters it has zeros
        before the first step, as a template.
        """
        return named_state(optimizer, self.module)

    def parameter_names(self, optimizer: Optimizer) -> Sequence[Sequence[str]]:
        """Return the names of the parameters in each group of an optimizer, as in :meth:`sharded_optimizer_state`.

        A strategy whose optimizers have other tensors than the module's parameters overrides it.
        """
        return parameter_names(optimizer, self.module)

    def optimizer_template(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return this process's tensors, into which a checkpoint of the optimizer is loaded; collective.

        :meth:`load_sharded_optimizer_state` is called after that.
        """
        return OptionalTensors(self.sharded_optimizer_state(optimizer))  # before the first step there may be none

    def load_sharded_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Load a state that :meth:`sharded_optimizer_state` returned, or the same with full tensors; collective.

        Raises:
            CheckpointError: It is the state of other parameters.
        """
        load_named_state(optimizer, self.module, state)

    def module_state_dict(self) -> dict[str, Any]:
        """Return the full state of the module under its own (unwrapped) names; collective.

        Of a strategy with ``replicates_state=False`` global rank 0 has it, and the others may have an empty dict.
        """
        return self.sharded_module_state()

    def stream_weights(
        self, *, everywhere: bool = False, selects: Callable[[str], bool] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the full tensors of the module's state one after the other; collective until its end.

        A program passes the weights on in this way while it trains, such as to an engine that generates samples: no
        process holds more than one full tensor beside its own shards, and a copy of it where shards are no rows of the
        same number.

        Args:
            everywhere: Whether each process gets the tensors; otherwise global rank 0 does, and the others, which take
                part too, get none.
            selects: Returns whether the tensor of a name is wanted, the same in each process; others are not sent.
                None for all.

        Yields:
            A name of :meth:`module_state_dict`, and its tensor on the device.  It is valid until the next one, and may
            be the module's own: copy it rather than change it.  Buffers that differ between processes, such as
            statistics of batches, are those of each process.
        """
        state = self.module_state_dict()
        if everywhere and not self.replicates_state:
            state = self.broadcast(state)
        if everywhere or self.is_global_zero:
            yield from ((name, value.detach()) for name, value in state.items() if is_streamed(name, selects))

    def load_module_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Load a state that :meth:`module_state_dict` returned; collective.

        Args:
            state: Tensors by name; those of global rank 0 count.
            strict: Whether missing and unexpected names are an error; otherwise they are logged.

        Raises:
            CheckpointError: It does not fit the module.
        """
        missing, unexpected = load_by_names(self.module, state)
        check_names(self.module, missing, unexpected, strict=strict, logs=self.is_global_zero)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the full state of an optimizer, with parameters by number as in its ``state_dict``; collective.

        Of a strategy with ``replicates_state=False`` global rank 0 has it, and the others may have an empty dict.
        """
        state = self.sharded_optimizer_state(optimizer)
        return number_parameters(state) if has_standard_layout(state) else state

    def load_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Load a state that :meth:`optimizer_state` returned; collective.

        Raises:
            CheckpointError: It is the state of other parameters.
        """
        if has_standard_layout(state):
            names = self.parameter_names(optimizer)
            if (mismatch := groups_misfit(optimizer, names, group_names(state))) is not None:
                raise CheckpointError(mismatch)
            state = name_parameters(state, names)
        self.load_sharded_optimizer_state(optimizer, dict(state))

    def local_weights(self) -> dict[str, Any]:
        """Return this process's parameters and buffers by name, in the memory that forward passes read; collective.

        Of sharded parameters they are the shards: DTensors, or
        :class:`~dstrat.interfaces.checkpoint_io.FlatShard`.  Tied parameters are the same object.  Callbacks that
        average the weights read them after steps, and change them in place for an evaluation; they call
        :meth:`accept_local_weights` then.  A strategy with ``replicates_state=False`` overrides both.

        Raises:
            ConflictError: The strategy has no such tensors.
        """
        if not self.replicates_state:
            raise ConflictError(
                f"{type(self).__name__} does not say which shards of the weights a process has (local_weights)"
            )
        return named_weights(self.module)

    def accept_local_weights(self) -> None:
        """Compute with the tensors of :meth:`local_weights`, which were changed in place; collective.

        Copies of the weights that an optimizer has are not changed: the same values come back before the next step.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return state for a checkpoint besides module and optimizers, the same in every process; collective."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state of :meth:`state_dict`, on any number of processes, after module and optimizers."""

    def rank_state(self) -> dict[str, Any]:
        """Return the state of this process alone, which an exact resumption needs; collective."""
        return {}

    def load_rank_state(self, state: Mapping[str, Any]) -> None:
        """Load a state that :meth:`rank_state` returned, after :meth:`load_state_dict`.

        It is not called if the number of processes has changed, or that of the shards of the training data.
        """

    def takes_gradients(self, state: Mapping[str, Any]) -> bool:
        """Return whether :meth:`load_rank_state` restores the gradients in a state, if it has any."""
        return True

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path) -> None:
        """Write a checkpoint once for the job, and wait until it is written; collective."""
        io = self.checkpoint_io
        if io.is_collective or self.is_global_zero:
            io.save_checkpoint(checkpoint, path)
        self.barrier("save_checkpoint")  # else another process could read the file, or end the job, too early

    def load_checkpoint(self, path: str | Path) -> dict[str, Any]:
        """Read a checkpoint; any process may call it alone."""
        return self.checkpoint_io.load_checkpoint(path)

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove a checkpoint; every process calls it, and global rank 0 acts."""
        if self.is_global_zero:
            self.checkpoint_io.remove_checkpoint(path)

    def _present(self, value: T | None, name: str) -> T:
        if value is None:
            raise MisuseError(
                f"{type(self).__name__} has no {name} yet: give it to the constructor, "
                "or let a Trainer complete the strategy first"
            )
        return value


def gather_objects(strategy: Strategy, value: T) -> list[T]:
    """Return a value of each rank, on all of them; collective."""
    return [strategy.broadcast(value, src=rank) for rank in range(strategy.world_size)]


def gather_if_different(strategy: Strategy, value: T, *, differs: bool) -> list[T] | None:
    """Return a value of each rank if it differs on any of them, otherwise None; collective.

    A vote comes first: ranks have the same names mostly, and exchanging those of a large model from each takes time.
    """
    return gather_objects(strategy, value) if strategy.reduce_boolean_decision(differs, all=False) else None


def log_out_of_memory(strategy: Strategy, exception: BaseException) -> None:
    """Log the rank, its device and what takes the memory there, if that is what an exception says is exhausted."""
    import torch

    if isinstance(exception, torch.OutOfMemoryError):
        device = strategy.root_device
        summary = strategy.accelerator.memory_summary(device)
        _logger.error("rank %d ran out of memory on %s\n%s", strategy.global_rank, device, summary)


def _check_signature(cls: type[Strategy], name: str, arguments: str) -> None:
    """Raise MisuseError where a class's own method needs more than the first of the arguments."""
    method = vars(cls).get(name)
    if not inspect.isfunction(method):
        return
    try:
        inspect.signature(method).bind(None, None)
    except TypeError as error:
        raise MisuseError(
            f"{cls.__name__}.{name}{inspect.signature(method)} cannot be called as dstrat calls it ({error}): "
            f"define it as {name}(self, {arguments})"
        ) from None
