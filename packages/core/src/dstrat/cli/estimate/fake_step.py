"""One training step on fake tensors, which have shapes and dtypes, and take no memory."""

from __future__ import annotations

import dataclasses
import logging
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from dstrat.cli.estimate.gpu_kernels import gpu_kernels
from dstrat.cli.estimate.live_memory import LiveMemory
from dstrat.cli.estimate.replay import NotEqualLayers, ReplayedLayers
from dstrat.cli.estimate.work import CountedWork, GroupedProductsOfAnyDtype, RecordedHeads
from dstrat.errors import DstratError, MisuseError
from dstrat.interfaces.batch import apply_to_tensors, tensors_in
from dstrat.interfaces.memory import TrainingSize
from dstrat.interfaces.optimizers import read_optimizers
from dstrat.parallel.internals import storage_key
from dstrat.training.arguments import adapt
from dstrat.training.module.train_module import TrainModule
from dstrat.training.module.trainer_access import TrainerAccess

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from torch.optim import Optimizer

    from dstrat.interfaces.memory import SavedActivations
    from dstrat.interfaces.precision import Precision


_STEPS = 1000
"""Optimizer steps of a training whose length is not known."""

RESULTS = (
    "a module with example_input_array; (module, batch), where the module has a training_step or returns its loss; "
    "or (module, batch, make_optimizers)"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingSetup:
    """A module with a batch and its optimizers.

    Attributes:
        module: The module.
        batch: A batch of one rank, or the inputs of the module's forward.
        make_optimizers: Returns the optimizers of the module, as ``configure_optimizers`` does.
        is_example: Whether the batch is the module's ``example_input_array``, for which there is no training step.
    """

    module: nn.Module
    batch: Any
    make_optimizers: Callable[[nn.Module], Any]
    is_example: bool = False


def read_training(returned: Any, source: str) -> TrainingSetup:
    """Return the training in the result of a factory, whose module is converted as ``Trainer.fit`` converts it.

    Args:
        returned: A module with ``example_input_array``, ``(module, batch)``, or ``(module, batch, make_optimizers)``.
        source: The factory, for error messages.

    Raises:
        MisuseError: The result is none of these.
    """
    module, *more = returned if isinstance(returned, tuple) else (returned,)
    if not isinstance(module, nn.Module) or len(more) > 2:
        raise MisuseError(f"{source} returned {_briefly(returned)}, and must return {RESULTS}")
    original, module = module, adapt(module, TrainModule)
    if more:
        batch, is_example = more[0], False
    else:
        batch, is_example = getattr(module, "example_input_array", None), True
        if batch is None:
            raise MisuseError(
                f"{source} returned a {type(module).__name__} without a batch: return (module, batch), or set its "
                "example_input_array"
            )
    if len(more) == 2:
        make = more[1]
        optimizers = make if module is original else lambda _: make(original)  # it knows the attributes of this one
    else:
        optimizers = _of_module if hasattr(module, "configure_optimizers") else _adamw
    return TrainingSetup(module=module, batch=batch, make_optimizers=optimizers, is_example=is_example)


def _adamw(module: nn.Module) -> Any:
    return torch.optim.AdamW(p for p in module.parameters() if p.requires_grad)


def _of_module(module: Any) -> Any:
    if not isinstance(module, TrainerAccess):
        return module.configure_optimizers()
    # Sizes do not depend on the schedule, which may need the length of the training.
    counts = ("estimated_stepping_batches", "max_steps", "max_epochs", "num_training_batches")
    known: dict[str, Any] = {
        "current_epoch": 0,
        "global_step": 0,
        "global_rank": 0,
        "local_rank": 0,
        "logger": None,
        "loggers": [],
        "is_running": True,
    }
    module.attach(cast("Any", SimpleNamespace(**dict.fromkeys(counts, _STEPS), **known)))
    try:
        return cast("Any", module).configure_optimizers()
    finally:
        module.attach(None)


def _briefly(value: Any) -> str:
    kinds = ", ".join(type(item).__name__ for item in value) if isinstance(value, tuple) else type(value).__name__
    return f"({kinds})" if isinstance(value, tuple) else f"a {kinds}"


def measure_training(
    make_training: Callable[[], TrainingSetup],
    precision: Precision,
    *,
    device_type: str,
    world_size: int,
    ranks_per_machine: int,
    batch_size: int | None = None,
    saved_activations: SavedActivations | None = None,
    forward_dtype: torch.dtype | None = None,
    same_optimizers: TrainingSize | None = None,
) -> TrainingSize:
    """Run two steps of a training on fake tensors, and return its sizes.

    Args:
        make_training: Called under fake tensors, so that a module of any size can be made.
        precision: The dtypes; it is connected to the module.
        device_type: Type of the devices, whose kernels and autocast count; the tensors themselves are on a fake CPU, as
            torch without CUDA computes nothing on others.
        world_size: Number of devices of the job.
        ranks_per_machine: Number of them on each machine.
        batch_size: Size of a rank's batch, its tensors' first dimension; None leaves it.
        saved_activations: How layers save activations, as a strategy has it.
        forward_dtype: Dtype that parameters have in a forward pass, as a strategy has it; None for their own.
        same_optimizers: Sizes of a training with the same parameters, whose optimizer step is not measured again.

    Raises:
        MisuseError: The training cannot run on fake tensors, for example as it reads values.
    """
    measure = partial(
        _measure,
        make_training,
        precision,
        device_type=device_type,
        world_size=world_size,
        ranks_per_machine=ranks_per_machine,
        batch_size=batch_size,
        saved_activations=saved_activations,
        forward_dtype=forward_dtype,
        same_optimizers=same_optimizers,
    )
    try:
        return measure(replays=True)
    except (NotEqualLayers, DstratError):  # an error of the training itself comes again
        return measure(replays=False)


def _measure(
    make_training: Callable[[], TrainingSetup],
    precision: Precision,
    *,
    device_type: str,
    world_size: int,
    ranks_per_machine: int,
    batch_size: int | None,
    saved_activations: SavedActivations | None,
    forward_dtype: torch.dtype | None,
    same_optimizers: TrainingSize | None,
    replays: bool,
) -> TrainingSize:
    """Return the sizes of a training, in whose step a few of equal layers run, or all; the arguments are as before.

    Raises:
        NotEqualLayers: Layers that look equal are not.
    """
    with _quiet(), _explained():
        training, module, mesh_dimension = _make_on_meta(make_training, precision)
        # Converted before, on the meta device: torch cannot convert modules of fake tensors.
        with FakeTensorMode(allow_non_fake_inputs=True):
            replace_by_fake(module)
            samples = _number_of_samples(training.batch)
            batch = precision.convert_input(_resized(training.batch, batch_size))
            memory = LiveMemory([*module.parameters(), *module.buffers()], forward_dtype)
            step = _step_of(training, module)
            work, attention = CountedWork(), RecordedHeads()
            kernels = gpu_kernels(device_type, precision, module)
            with GroupedProductsOfAnyDtype(), memory, work:  # the first is innermost: its copies do not count
                optimizers = read_optimizers(training.make_optimizers(module), steps_schedulers=False).optimizers
                _prefer_foreach(optimizers, device_type)
                if saved_activations is not None:
                    host = _host_of(device_type)
                    saved_activations.select(module, torch.device(device_type), has_streams=True, host=host)()
                replayed = ReplayedLayers(module) if replays else None
                if replayed is not None:
                    replayed.start(memory, work)
                _count_gradients(module, memory)
                memory.begin_step(batch)
                with attention, kernels, precision.forward_context(), _recorded_layers(module, memory) as layers:
                    loss = step(batch)
                precision.backward(loss)
                skipped = frozenset[int]() if replayed is None else replayed.skipped_parameters
                unused = [name for name, one in module.named_parameters() if _is_unused(one, skipped)]
                if replayed is not None:
                    replayed.complete(layers)
                work_of_batch = work.take()
                memory.begin_optimizer_step()
                if same_optimizers is None:
                    for optimizer in optimizers:
                        optimizer.step()
                state = _bytes(_state_tensors(optimizers))
                temporaries = memory.largest_in_optimizer_step(state)
    size = _size_of_module(
        module, precision, device_type=device_type, world_size=world_size, ranks_per_machine=ranks_per_machine
    )
    stepped = same_optimizers
    return dataclasses.replace(
        size,
        optimizer_state=state if stepped is None else stepped.optimizer_state,
        optimizer_temporaries=temporaries if stepped is None else stepped.optimizer_temporaries,
        timeline=tuple(memory.timeline),
        offloaded_activations=memory.largest_on_host,
        batch_size=samples if batch_size is None or not samples else batch_size,
        outputs=layers.outputs,
        inputs=layers.inputs,
        saved=layers.saved,
        heads=frozenset(attention.heads),
        mesh_dimension=mesh_dimension,
        batch_shapes=tuple(tuple(tensor.shape) for tensor in tensors_in(batch)),
        optimizers=optimizers,
        unused=tuple(unused),
        work=work_of_batch,
        optimizer_work=work.take() if stepped is None else stepped.optimizer_work,
    )


def measure_module(
    make_training: Callable[[], TrainingSetup],
    precision: Precision,
    *,
    device_type: str,
    world_size: int,
    ranks_per_machine: int,
) -> TrainingSize:
    """Return the sizes of a training's module, without those of a step, which takes longer to measure.

    Args:
        make_training: As of :func:`measure_training`.
        precision: The dtypes; it is connected to the module.
        device_type: Type of the devices.
        world_size: Number of devices of the job.
        ranks_per_machine: Number of them on each machine.

    Raises:
        MisuseError: The module cannot be made on the meta device.
    """
    with _quiet(), _explained():
        _, module, mesh_dimension = _make_on_meta(make_training, precision)
    size = _size_of_module(
        module, precision, device_type=device_type, world_size=world_size, ranks_per_machine=ranks_per_machine
    )
    return dataclasses.replace(size, mesh_dimension=mesh_dimension)


def _make_on_meta(
    make_training: Callable[[], TrainingSetup], precision: Precision
) -> tuple[TrainingSetup, nn.Module, str | None]:
    """Return a training, its module with the dtypes of a precision, and the mesh dimension that this asked for.

    On the meta device a model of any size can be made; its initialization computes nothing there.
    """
    with torch.device("meta"), precision.tensor_init_context():
        training = make_training()
        mesh_dimension = _configure(training.module)
        return training, precision.connect(training.module), mesh_dimension


def _is_unused(parameter: nn.Parameter, skipped: Collection[int]) -> bool:
    return parameter.requires_grad and parameter.grad is None and id(parameter) not in skipped


def _size_of_module(module: nn.Module, precision: Precision, **devices: Any) -> TrainingSize:
    parameters = list(module.parameters())
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    return TrainingSize(
        module=module,
        precision=precision,
        **devices,
        parameters=_bytes(parameters),
        trainable_parameters=_bytes(trainable),
        trainable_numel=sum(parameter.numel() for parameter in trainable),
        largest_parameter=max((_bytes([parameter]) for parameter in parameters), default=0),
        module_buffers=_bytes(module.buffers()),
        optimizer_state=0,
        optimizer_temporaries=0,
        timeline=(),
    )


class _SplitsLayers(Exception):  # noqa: N818 - not an error: it ends configure_model
    """The module has reached for its mesh, over which it splits its layers.

    Attributes:
        dimension: The name that it asked for; empty if it has reached for something else.
    """

    def __init__(self, dimension: str = "") -> None:
        super().__init__()
        self.dimension = dimension


class _NoMesh:
    """The mesh of a module that is measured on one device."""

    def __getitem__(self, name: object) -> Any:
        raise _SplitsLayers(name if isinstance(name, str) else "")

    def __getattr__(self, name: str) -> Any:
        raise _SplitsLayers


def _configure(module: Any) -> str | None:
    """Run ``configure_model`` of a module up to where it splits layers over a mesh, of which there is none.

    Returns:
        The mesh dimension that it asks for; empty if it reaches for the mesh otherwise, None if it does not.
    """
    configure_model = getattr(module, "configure_model", None)
    if configure_model is None:
        return None
    mesh, dimension = _NoMesh(), None
    if isinstance(module, TrainerAccess):
        strategy = SimpleNamespace(device_mesh=mesh, compiled_steps=lambda: None)
        module.attach(cast("Any", SimpleNamespace(strategy=strategy, is_running=True)))
    else:
        module.device_mesh = mesh
    try:
        configure_model()
    except _SplitsLayers as splits:
        dimension = splits.dimension
    if isinstance(module, TrainerAccess):
        module.attach(None)
    else:
        del module.device_mesh
    return dimension


def _host_of(device_type: str) -> str:
    """Return the type of device that stands for the host, as the CPU stands for the device; a CPU has one memory."""
    return "cpu" if device_type == "cpu" else "meta"


def replace_by_fake(module: nn.Module) -> None:
    """Replace the parameters and buffers of a module by fake tensors on the CPU; shared ones stay shared."""
    replaced: dict[int, Any] = {}
    for layer in module.modules():
        for name, parameter in list(layer.named_parameters(recurse=False, remove_duplicate=False)):
            if id(parameter) not in replaced:
                fake = torch.empty_like(parameter, device="cpu")
                replaced[id(parameter)] = nn.Parameter(fake, parameter.requires_grad)
            setattr(layer, name, replaced[id(parameter)])
        for name, buffer in list(layer.named_buffers(recurse=False, remove_duplicate=False)):
            if id(buffer) not in replaced:
                replaced[id(buffer)] = torch.empty_like(buffer, device="cpu")
            setattr(layer, name, replaced[id(buffer)])


def _count_gradients(module: nn.Module, memory: LiveMemory) -> None:
    """Count gradients as such when they are accumulated."""
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(memory.count_gradient)


@contextmanager
def _recorded_layers(module: nn.Module, memory: LiveMemory) -> Iterator[RecordedLayers]:
    """Record the layers of a forward pass, and not those that a backward pass computes again."""
    recorded = RecordedLayers({}, {}, {})

    def begin(name: str, _layer: nn.Module, _inputs: Any) -> None:
        recorded.saved[name] = recorded.saved.get(name, 0) - memory.live

    def end(name: str, _layer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        recorded.saved[name] += memory.live
        recorded.inputs[name] = tuple(tuple(tensor.shape) for tensor in tensors_in((args, kwargs)))
        sizes = (tensor.nbytes for tensor in tensors_in(output))
        recorded.outputs[name] = recorded.outputs.get(name, 0) + sum(sizes)

    handles = []
    for name, layer in module.named_modules():
        handles.append(layer.register_forward_pre_hook(partial(begin, name)))
        handles.append(layer.register_forward_hook(partial(end, name), with_kwargs=True))
    yield recorded
    for handle in handles:
        handle.remove()


@dataclass(frozen=True, slots=True)
class RecordedLayers:
    """Shapes of the inputs of each layer by its name, bytes of its outputs, and of what it leaves in memory."""

    inputs: dict[str, tuple[tuple[int, ...], ...]]
    outputs: dict[str, int]
    saved: dict[str, int]


def _step_of(training: TrainingSetup, module: Any) -> Callable[[Any], Tensor]:
    """Return the function that computes the loss of a batch."""
    if not training.is_example and callable(getattr(module, "training_step", None)):
        if not getattr(module, "automatic_optimization", True):
            raise MisuseError(
                f"{type(module).__name__} has automatic_optimization=False, and its step needs a Trainer: estimate a "
                "module whose training_step returns the loss"
            )
        return lambda batch: _loss(module.training_step(batch, 0))
    return lambda batch: _loss(_call(module, batch))


def _call(module: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return module(**batch)
    if isinstance(batch, tuple | list):
        return module(*batch)
    return module(batch)


def _loss(output: Any) -> Tensor:
    """Return the loss in the output of a step; without one, the mean of the outputs that have gradients."""
    if isinstance(output, Mapping) and output.get("loss") is not None:
        output = output["loss"]
    elif isinstance(getattr(output, "loss", None), Tensor):
        output = output.loss
    trained = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
    means = [tensor.float().mean() if tensor.dim() else tensor for tensor in trained]
    if not means:
        raise MisuseError(f"the step returned {type(output).__name__} without a gradient, so that nothing is trained")
    return means[0] if len(means) == 1 else torch.stack(means).sum()


def _number_of_samples(batch: Any) -> int:
    """Return the first dimension of the first tensor that has one; one of a single row is broadcast over others."""
    tensors = [tensor for tensor in tensors_in(batch) if tensor.dim()]
    sizes = [len(tensor) for tensor in tensors if tensor.dim() == tensors[0].dim()]  # a vector beside them has no rows
    return next((size for size in sizes if size > 1), sizes[0] if sizes else 0)


def _resized(batch: Any, size: int | None) -> Any:
    """Return a fake batch, with another number of samples unless that is None."""
    samples = _number_of_samples(batch)

    def resize(tensor: Tensor) -> Tensor:
        has_batch = size is not None and tensor.dim() > 0 and tensor.shape[0] == samples
        shape = (size, *tensor.shape[1:]) if has_batch else tensor.shape
        return torch.empty(shape, dtype=tensor.dtype, device="cpu")

    return apply_to_tensors(batch, resize)


def _state_tensors(optimizers: Iterable[Optimizer]) -> Iterator[Tensor]:
    for optimizer in optimizers:
        for state in optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Return the size of the tensors' storages, each counted once."""
    return sum({storage_key(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


def _prefer_foreach(optimizers: Iterable[Optimizer], device_type: str) -> None:
    """Let optimizers step all parameters in common operations, as torch does by default on devices but the CPU."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if device_type != "cpu" and group.get("foreach", True) is None and not group.get("fused"):
                group["foreach"] = True


@contextmanager
def _quiet() -> Iterator[None]:
    logger = logging.getLogger(FakeTensorMode.__module__)  # it prints a traceback of each error, which is raised too
    level = logger.level
    # What the training prints does not get into JSON.
    with warnings.catch_warnings(), redirect_stdout(sys.stderr):
        warnings.simplefilter("ignore")  # a real step gives the same ones
        logger.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            logger.setLevel(level)


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except (DstratError, NotEqualLayers):
        raise
    except Exception as error:
        raise MisuseError(
            f"the training raised {type(error).__name__}: {error}.  It runs on fake tensors, which have no values: if "
            "it reads some, as .item() and conditions on tensors do, let the factory return a module that reads none"
        ) from error
