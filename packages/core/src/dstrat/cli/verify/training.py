"""Training to verify, of a factory or a script, and its runs with records of values."""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import logging
import multiprocessing
import runpy
import sys
import traceback
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch.library import Library
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from dstrat.cli.estimate.command import load_factory
from dstrat.cli.estimate.fake_step import read_training
from dstrat.errors import LaunchError, MisuseError, RequestError
from dstrat.interfaces.batch import apply_to_tensors, tensors_in
from dstrat.parallel.meta_device import materialize_on_cpu, parameters_on_meta
from dstrat.training.callbacks.callback import Callback
from dstrat.training.hooks import overrides
from dstrat.training.loops.sources import DataSources
from dstrat.training.module.train_module import TrainModule
from dstrat.training.trainer import Trainer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.nn import Module

    from dstrat.interfaces.strategy import Strategy

_logger = logging.getLogger(__name__)

LEARNING_RATE = 2.0**20
"""Of one step of plain SGD, which shows the gradients of any strategy: parameters vanish beside them."""

_COPIED_OPTIONS = ("gradient_clip_val", "gradient_clip_algorithm", "accumulate_grad_batches")
# What a script asks of hardware, which this machine may not have, and nothing of it is copied.
_ON_THIS_MACHINE = {
    "accelerator": "cpu",
    "strategy": "single_device",
    "devices": 1,
    "num_nodes": 1,
    "precision": None,
    "plugins": None,
    "max_restarts": 0,
    "elastic": False,
    "preemption_deadline": None,
}
# Position of the probability of dropout among the arguments of torch's operations.
_PROBABILITIES = {
    **{f"{kind}dropout{end}": 1 for kind in ("", "alpha_", "feature_", "feature_alpha_") for end in ("", "_")},
    "scaled_dot_product_attention": 4,
}
_MIN_BYTES = 2**17  # of what the C library takes from the system, and not from its heap
_CHECKED = 1_000_003  # a prime: the weights of a checksum repeat at no power of two


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifiedTraining:
    """A training to verify.

    Attributes:
        module: The module; each run has a copy.
        batches: The batches of all processes together.
        options: Further arguments of the Trainer.
        make_optimizers: Returns the optimizers of a module, if that has no ``configure_optimizers``.
        reduced: The numbers of layers before and after, of lists that were cut, by name.
        num_layers: How many repeated layers are kept of those that ``configure_model`` makes; None for all.  Then a run
            in this process adds to ``reduced``.
    """

    module: TrainModule
    batches: list[Any]
    options: dict[str, Any] = field(default_factory=dict)
    make_optimizers: Callable[[Module], Any] | None = None
    reduced: dict[str, tuple[int, int]] = field(default_factory=dict)
    num_layers: int | None = None


def read(source: str, steps: int, num_layers: int | None = None, arguments: Sequence[str] = ()) -> VerifiedTraining:
    """Return the training of ``script.py`` or of ``package.module:factory``.

    Args:
        source: The script, of which the first fit counts, or the factory.
        steps: Number of batches.
        num_layers: How many of the layers that repeat are kept; None for all.
        arguments: Those of the script.

    Raises:
        RequestError: There is no such script or factory, or a factory has arguments.
        MisuseError: It makes no training, or no layers repeat in its module.
    """
    if source.endswith(".py"):
        make = partial(_of_script, source, steps, arguments)
    elif arguments:
        raise RequestError(f"{source!r} is no script, and gets no arguments: leave out {' '.join(arguments)!r}")
    else:
        make = partial(_of_factory, source, load_factory(source, "TRAINING"), steps)
    torch.manual_seed(0)
    if num_layers is None:
        return make()
    try:
        with parameters_on_meta(), _EmptyOnMeta():
            training = make()
        _check_values(training)
        reduced = training.module.keep_layers(num_layers)
        materialize_on_cpu(training.module)
    except RequestError:
        raise
    except Exception as error:  # noqa: BLE001 - of the user's, which comes again where it has another cause
        _logger.warning("the module is made in full, and reduced then: %s", error)
        training = make()
        reduced = training.module.keep_layers(num_layers)
    gc.collect()  # processes are forked, for which the memory of removed layers would count
    if reduced:
        return replace(training, reduced=dict(reduced))
    if overrides(training.module, "configure_model", TrainModule):
        return replace(training, num_layers=num_layers)
    raise _nothing_repeats(training.module, num_layers)


class _EmptyOnMeta(TorchFunctionMode):
    """Makes large tensors without values on the meta device, of which layers make parameters.

    :func:`parameters_on_meta` frees the memory of each, but between small objects its addresses are lost, and Linux
    forks no process with many more addresses than the machine has memory.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.empty and kwargs.get("device") is None and "out" not in kwargs:
            on_meta: Tensor = func(*args, **{**kwargs, "device": "meta"})
            if on_meta.nbytes >= _MIN_BYTES and on_meta.is_floating_point():
                return on_meta
        return func(*args, **kwargs)


def _check_values(training: VerifiedTraining) -> None:
    """Refuse buffers and batches whose values are lost on the meta device."""
    if any(tensor.is_meta for tensor in (*training.module.buffers(), *tensors_in(training.batches))):
        raise MisuseError("a buffer or a batch was made by torch.empty, and its values are lost on the meta device")


def _nothing_repeats(module: TrainModule, num_layers: int) -> MisuseError:
    return MisuseError(
        f"--layers {num_layers} reduces nothing in {type(module).__name__}: none of its nn.ModuleList, nn.Sequential "
        f"and nn.ModuleDict has more than {num_layers} equal layers that follow one another.  Leave it out, or define "
        "keep_layers(self, count) in the module"
    )


def _of_factory(source: str, factory: Callable[[], Any], steps: int) -> VerifiedTraining:
    returned = factory()
    setup = read_training(returned, repr(source))
    if setup.is_example or not isinstance(setup.module, TrainModule):
        raise MisuseError(
            f"{source!r} returned a {type(setup.module).__name__}{' without a batch' * setup.is_example}: return "
            "(module, batch) with a TrainModule"
        )
    make_optimizers = setup.make_optimizers if len(returned) == 3 else None
    return VerifiedTraining(module=setup.module, batches=[setup.batch] * steps, make_optimizers=make_optimizers)


class _Reached(BaseException):
    """A script has come to its first fit."""

    def __init__(self, trainer: Trainer, sources: DataSources) -> None:
        self.trainer, self.sources = trainer, sources


def _of_script(source: str, steps: int, arguments: Sequence[str]) -> VerifiedTraining:
    if not Path(source).is_file():
        raise RequestError(f"there is no script {source!r}")

    def reach(
        trainer: Trainer,
        model: Any,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> NoReturn:
        datamodule = args[0] if args else kwargs.get("datamodule")
        raise _Reached(trainer, DataSources(model, datamodule, {"train": train_dataloaders, "val": val_dataloaders}))

    initialize, fit, outer_arguments, path = Trainer.__init__, Trainer.fit, sys.argv[:], sys.path[:]

    @functools.wraps(initialize)
    def initialize_on_cpu(trainer: Trainer, **options: Any) -> None:
        initialize(trainer, **{**options, **_ON_THIS_MACHINE})

    Trainer.__init__ = initialize_on_cpu  # type: ignore[method-assign,assignment]  # until the script comes to its fit
    Trainer.fit = reach  # type: ignore[method-assign,assignment]  # likewise
    sys.argv[:] = [source, *arguments]
    sys.path.insert(0, str(Path(source).resolve().parent))
    try:
        with redirect_stdout(sys.stderr):
            runpy.run_path(source, run_name="__main__")
    except _Reached as reached:
        trainer, sources = reached.trainer, reached.sources
    else:
        raise MisuseError(f"{source!r} ended without a call of trainer.fit: verify a script that trains")
    finally:
        Trainer.__init__, Trainer.fit = initialize, fit  # type: ignore[method-assign]  # likewise
        sys.argv[:], sys.path[:] = outer_arguments, path
    if sources.datamodule is not None:
        sources.datamodule.prepare_data()
        sources.datamodule.setup("fit")
    batches = list(itertools.islice(sources.loader("train"), steps))
    if not batches:
        raise MisuseError(f"the training loader of {source!r} has no batch")
    options = {name: getattr(trainer, name) for name in _COPIED_OPTIONS}
    return VerifiedTraining(module=sources.module, batches=batches, options=options)


# A run, and its records


@contextmanager
def without_dropout() -> Iterator[None]:
    """Turn off dropout on CPUs in a ``with`` block, and in processes that are forked in it.

    Layers, functions that were imported by their names, attention and recurrent layers come to the same few operations
    of torch.  These are replaced where torch dispatches them, also in a backward pass that computes layers again, where
    torch leaves a ``TorchFunctionMode``.
    """
    library = Library("aten", "IMPL")
    for name, position in _PROBABILITIES.items():
        library.impl(name, _with_probability_0(getattr(torch.ops.aten, name).default, position), "AutogradCPU")
    try:
        yield
    finally:
        del library  # which removes them


def _with_probability_0(operation: Any, position: int) -> Callable[..., Any]:
    def compute(*args: Any, **kwargs: Any) -> Any:
        changed = (0.0 if index == position else argument for index, argument in enumerate(args))
        return operation.decompose(*changed, **kwargs)  # torch's own kernel, in place of which this one is

    return compute


def record(
    training: VerifiedTraining,
    strategy: Strategy | str,
    devices: int,
    folder: Path,
    *,
    shows_gradients: bool,
    **options: Any,
) -> None:
    """Train without dropout, and write a record of each process into a folder.

    Args:
        training: The training.
        strategy: The strategy.
        devices: Number of its devices.
        folder: An existing folder.
        shows_gradients: Whether one step with plain SGD shows gradients, instead of all steps with the user's
            optimizer.
        **options: Further arguments of the Trainer.
    """
    module = copy.deepcopy(training.module)
    if training.make_optimizers is not None:
        make = training.make_optimizers
        module.configure_optimizers = lambda: make(module)  # type: ignore[method-assign]  # of this copy
    if training.num_layers is not None:
        _reduce_when_configured(module, training.num_layers, training.reduced)
    batches = training.batches
    if shows_gradients:
        batches = batches[:1]
        module.configure_optimizers = lambda: torch.optim.SGD(  # type: ignore[method-assign]  # likewise
            module.parameters(), lr=LEARNING_RATE
        )
        options |= {"accumulate_grad_batches": 1, "gradient_clip_val": None}
    torch.manual_seed(0)
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=devices,
        max_epochs=1,
        callbacks=[Recorder(folder)],
        num_sanity_val_steps=0,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        **{**training.options, **options},
    )
    with without_dropout():  # its random numbers depend on the layout
        trainer.fit(module, SharedBatches(batches, trainer))


def record_in_child(
    training: VerifiedTraining, strategy: Strategy | str, folder: Path, *, shows_gradients: bool
) -> None:
    """Write a record of one device, as :func:`record` does, from a process that is forked.

    This one computes no gradients: where torch sees a GPU, it refuses them in processes that are forked later.

    Raises:
        LaunchError: The process was killed.
        Exception: That of the training.
    """
    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)

    def run() -> None:
        try:
            record(training, strategy, 1, folder, shows_gradients=shows_gradients)
            outcome: Any = None, "", training.reduced  # which may be known from then on only
        except Exception as error:  # noqa: BLE001 - raised again
            outcome = error, traceback.format_exc(), {}
        sending.send(outcome)

    process = context.Process(target=run)
    process.start()
    sending.close()
    try:
        error, stack, reduced = receiving.recv()
    except EOFError:
        process.join()
        raise LaunchError(f"the training on one device ended with the exit code {process.exitcode}") from None
    process.join()
    if error is not None:
        raise error from LaunchError(f"the training on one device failed:\n{stack}")
    training.reduced.update(reduced)


def _reduce_when_configured(module: TrainModule, num_layers: int, reduced: dict[str, tuple[int, int]]) -> None:
    """Let a module keep the first of the layers that repeat when its ``configure_model`` has made them."""
    configure = module.configure_model

    def configure_and_reduce() -> None:
        shards_later = torch.nn.LayerNorm(1).weight.is_meta  # then the strategy gives parameters their values
        with parameters_on_meta():
            configure()
        reduced.update(module.keep_layers(num_layers))
        if not reduced:
            raise _nothing_repeats(module, num_layers)
        if not shards_later:
            materialize_on_cpu(module)

    module.configure_model = configure_and_reduce  # type: ignore[method-assign]  # of this copy


class SharedBatches:
    """The batches of all processes, of which each reads its share of the samples.

    Args:
        batches: The batches.
        trainer: Its strategy knows the share.
    """

    def __init__(self, batches: list[Any], trainer: Trainer) -> None:
        self._batches, self._trainer = batches, trainer

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        first, count = share_of(self._trainer.strategy)

        def take(tensor: Tensor) -> Tensor:
            if tensor.dim() == 0:
                return tensor
            if len(tensor) % count:
                raise MisuseError(
                    f"a batch of {len(tensor)} samples cannot be shared by {count} groups of ranks, which would have "
                    f"other batches then: verify with batches of a multiple of {count} samples"
                )
            return tensor[first::count]

        for batch in self._batches:
            yield apply_to_tensors(batch, take)


def share_of(strategy: Strategy) -> tuple[int, int]:
    """Return the index of the share of the data that this process reads, and the number of shares."""
    arguments = {"rank": 0, "num_replicas": 1} | strategy.training_sampler_kwargs
    return arguments["rank"], arguments["num_replicas"]


class Recorder(Callback):
    """Records the outputs of layers in the first step, losses, and the module's state before and after.

    Args:
        folder: Gets a file from each process.
    """

    runs_last = True

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._hooks: list[Any] = []
        self._random_state = torch.empty(0)
        self._values: dict[str, Any] = {"outputs": {}, "losses": []}

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._values["names"] = [name for name, _ in module.named_parameters()]
        self._values["before"] = _on_cpu(trainer.strategy.module_state_dict())
        self._values["share"] = share_of(trainer.strategy)
        for name, layer in module.named_modules():
            # A layer with parameters on meta belongs to another rank, and passes its input through, if it is called.
            if name and not any(parameter.is_meta for parameter in layer.parameters()):
                self._hooks.append(layer.register_forward_hook(self._recording(name)))

    def _recording(self, name: str) -> Callable[..., None]:
        outputs = self._values["outputs"]

        def note(_layer: Module, _inputs: Any, output: Any) -> None:
            tensors = tensors_in(output)
            if tensors and tensors[0].dim() and tensors[0].is_floating_point():
                full: Any = tensors[0].detach()
                full = full.full_tensor() if hasattr(full, "full_tensor") else full
                outputs.setdefault(name, []).append((tuple(full.shape[1:]), _checksums(full), _of_tokens(full)))

        return note

    @override
    def on_train_batch_start(self, trainer: Trainer, module: TrainModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self._values["samples"] = max((len(tensor) for tensor in tensors_in(batch) if tensor.dim()), default=0)
            self._random_state = torch.get_rng_state()

    def on_train_batch_end(self, trainer: Trainer, *hook_arguments: Any) -> None:
        outputs = hook_arguments[1]
        if not self._values["losses"]:
            self._values["draws_random_numbers"] = not torch.equal(self._random_state, torch.get_rng_state())
        for hook in self._hooks:  # after the first step
            hook.remove()
        self._hooks = []
        strategy = trainer.strategy
        weight = torch.as_tensor(outputs.get("weight", 1.0), dtype=torch.float64)
        pair = torch.stack([outputs["loss"].detach().double().cpu() * weight, weight]).to(torch.float32)
        pair = strategy.reduce(pair.to(strategy.root_device), reduce_op="mean").cpu()
        self._values["losses"].append(float(pair[0] / pair[1]))

    @override
    def on_train_end(self, trainer: Trainer, module: TrainModule) -> None:
        self._values["after"] = _on_cpu(trainer.strategy.module_state_dict())
        torch.save(self._values, self._folder / f"{trainer.global_rank}.pt")


def _on_cpu(state: dict[str, Any]) -> dict[str, Tensor]:
    return {name: value.detach().cpu().clone() for name, value in state.items() if isinstance(value, Tensor)}


def _of_tokens(output: Tensor) -> Tensor | None:
    """Return checksums of an output with sequences, for each of their elements; None without sequences."""
    if output.dim() < 3:
        return None
    return _checksums(output.flatten(0, 1)).reshape(*output.shape[:2], -1)


def _checksums(output: Tensor) -> Tensor:
    """Return two numbers for each row of an output: a norm, and a sum that depends on the order of its elements."""
    rows = output.double().reshape(len(output), -1)
    weights = torch.arange(1, rows.shape[1] + 1, dtype=torch.float64, device=rows.device).mul(_CHECKED).cos()
    return torch.stack([rows.square().sum(1).sqrt(), rows @ weights], dim=1).cpu()
