"""Trainings and evaluations in a rank, as plain values, and their reference on one device."""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from typing_extensions import override

from dstrat.checkpoint.portable.checkpoint_io import PortableCheckpointIO
from dstrat.checkpoint.torch_file import TorchCheckpointIO
from dstrat.interfaces.checkpoint_io import CheckpointIO, FlatShard
from dstrat.interfaces.memory import TrainingSize
from dstrat.parallel.internals import RecordedCollectives
from dstrat.parallel.shards import local_tensor
from dstrat.plugins.catalog import get_catalog
from dstrat.testing.ranks.jobs import Subject, open_strategy, run_in_team
from dstrat.testing.ranks.modules import GLOBAL_BATCH, NETS, Net, dataset
from dstrat.training.callbacks.callback import Callback
from dstrat.training.trainer import Trainer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dstrat.interfaces.communication import Collective, CommunicationLayout
    from dstrat.interfaces.memory import MemoryLayout
    from dstrat.testing.ranks.team import RankContext


_FORMATS = {"portable": PortableCheckpointIO, "torch": TorchCheckpointIO}


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """A training.

    Attributes:
        net: Which module, see :data:`~dstrat.testing.ranks.modules.NETS`.
        optimizer: AdamW, or SGD with a learning rate of 1, which shows the gradients.
        samples: Size of the data.
        evaluated: Size of the data of an evaluation.
        epochs: Number of epochs.
        accumulate: Batches of an optimizer step.
        clip: Largest norm or value of gradients.
        algorithm: Which of the two.
        shuffle: Whether the data is shuffled.
        precision: Flag of the precision.
        accelerator: Alias of the accelerator.
        stop_at: Optimizer steps after which it stops; -1 goes to the end.
        save_to: Where a checkpoint is saved at the end, or at ``save_at``.
        save_at: Optimizer steps after which it is saved.
        resume_from: A checkpoint from which it goes on.
        checkpoint_format: Its format.
        validate_every: Batches after which it validates; 0 never does.
    """

    net: str = "plain"
    optimizer: Literal["adamw", "sgd"] = "adamw"
    samples: int = 160
    evaluated: int = 13
    epochs: int = 1
    accumulate: int = 1
    clip: float | None = None
    algorithm: Literal["norm", "value"] = "norm"
    shuffle: bool = False
    precision: str = "32-true"
    accelerator: str = "cpu"
    stop_at: int = -1
    save_to: str | None = None
    save_at: int = -1
    resume_from: str | None = None
    checkpoint_format: Literal["portable", "torch"] = "portable"
    validate_every: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class FitResult:
    """The result of a training in one rank.

    Attributes:
        losses: The rank's own loss of each batch.
        seen: The samples of each batch.
        state: The whole state of the module before the end, by name, flattened; of the first rank, others may lack it.
        user_state: The same of the user's module after the end.
        steps: Number of optimizer steps.
        rates: The learning rates in each batch, one for each group of parameters, where the module notes them.
        drawn: A random number, after the last step.
        buffers: The rank's own buffers before the end, by name, flattened.
        validated: What each validation has logged, by name.
    """

    losses: list[float]
    seen: list[list[int]]
    state: dict[str, list[float]]
    user_state: dict[str, list[float]]
    steps: int
    rates: list[list[float]]
    drawn: float
    buffers: dict[str, list[float]]
    validated: list[dict[str, float]]


def fit(rank_context: RankContext, subject: Subject, work: Fit) -> FitResult:
    """Train, in each rank."""
    net = NETS[work.net](work, subject.configure_model, rank_context.rank)
    end = _FinalState(work)
    trainer = make_trainer(rank_context, subject, work, [end])
    trainer.fit(net, ckpt_path=work.resume_from)
    return FitResult(
        losses=net.losses,
        seen=net.seen,
        state=end.state,
        user_state=plain(net),
        steps=trainer.global_step,
        rates=getattr(net, "rates", []),
        drawn=end.drawn,
        buffers=end.buffers,
        validated=end.validated,
    )


def fit_twice(rank_context: RankContext, subject: Subject, work: Fit) -> tuple[FitResult, FitResult | str]:
    """Train two modules one after the other in the same processes; an error in the second is a text."""
    return fit(rank_context, subject, work), try_fit(rank_context, subject, work)


def fit_after_breaking(rank_context: RankContext, subject: Subject, work: Fit) -> tuple[str, FitResult | str]:
    """Train a module that raises in every rank, and then a good one; return the error and the second result."""
    broken = try_fit(rank_context, subject, replace(work, net="breaking"))
    return str(broken) if isinstance(broken, str) else "", try_fit(rank_context, subject, work)


def try_fit(rank_context: RankContext, subject: Subject, work: Fit) -> FitResult | str:
    """Train; return the result, or the error as a text."""
    try:
        return fit(rank_context, subject, work)
    except Exception as error:  # noqa: BLE001 - whatever it is, the test looks at it
        return f"{type(error).__name__}: {error}"


def evaluate(rank_context: RankContext, subject: Subject, work: Fit) -> dict[str, Any]:
    """Validate, test and predict; return what was logged and predicted, and which samples ran."""
    results: dict[str, Any] = {}
    for name in ("validate", "test", "predict"):
        net = NETS[work.net](work, subject.configure_model)
        trainer = make_trainer(rank_context, subject, work, [], limit_val_batches=None)
        outputs = getattr(trainer, name)(net) or []
        predicted = [number for batch in outputs for number in batch.tolist()] if name == "predict" else None
        results[name] = dict(outputs[0]) if predicted is None else predicted, net.seen
    return results


def make_trainer(
    rank_context: RankContext, subject: Subject, work: Fit, callbacks: list[Callback], **arguments: Any
) -> Trainer:
    """Return a Trainer without loggers, progress bar, summary and checkpoints."""
    starts = subject.component.starts_processes
    plugins = [*([rank_context.cluster] if starts else []), _FORMATS[work.checkpoint_format]()]
    defaults = {
        "strategy": subject.make(),
        "accelerator": work.accelerator,
        "devices": rank_context.world_size * subject.devices_per_process,
        "precision": work.precision,
        "plugins": plugins,
        "max_epochs": work.epochs,
        "max_steps": work.stop_at,
        "accumulate_grad_batches": work.accumulate,
        "gradient_clip_val": work.clip,
        "gradient_clip_algorithm": work.algorithm,
        "num_sanity_val_steps": 0,
        "limit_val_batches": None if work.validate_every else 0,
        "val_check_interval": work.validate_every or None,
        "logger": False,
        "callbacks": callbacks,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "default_root_dir": rank_context.folder,
    }
    return Trainer(**{**defaults, **arguments})


def plain(module: torch.nn.Module) -> dict[str, list[float]]:
    """Return the parameters of a module as lists, without those that are sharded or only on another rank."""
    local_parameters = {name: value for name, value in module.named_parameters() if not value.is_meta}
    return {name: numbers(value) for name, value in local_parameters.items() if type(value.data) is torch.Tensor}


def numbers(tensor: torch.Tensor) -> list[float]:
    """Return the numbers of a tensor as floats, without loss of precision."""
    listed: list[float] = tensor.detach().cpu().double().flatten().tolist()
    # NaN for infinity, too, as it equals nothing: two trainings that both diverge are not the same.
    return [number if math.isfinite(number) else math.nan for number in listed]


class _FinalState(Callback):
    """Records the full state of the module at the end, and saves a checkpoint where ``save_to`` is set."""

    saves_checkpoints = runs_last = True

    def __init__(self, work: Fit) -> None:
        self.work = work
        self.state: dict[str, list[float]] = {}
        self.buffers: dict[str, list[float]] = {}
        self.validated: list[dict[str, float]] = []
        self.drawn = 0.0

    @override
    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        path = self.work.save_to
        # The step's number stays for the batches that are accumulated after it.
        if path is not None and trainer.global_step == self.work.save_at and not Path(path).exists():
            trainer.save_checkpoint(Path(path))

    @override
    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self.validated.append({name: float(value) for name, value in trainer.callback_metrics.items()})

    def on_fit_end(self, trainer: Any, module: Any) -> None:
        state = trainer.strategy.module_state_dict()
        self.state = {name: numbers(value) for name, value in state.items() if isinstance(value, torch.Tensor)}
        self.buffers = {name: numbers(value) for name, value in module.named_buffers()}
        self.drawn = float(torch.rand(()))


# Saving and loading in a rank of the kit


_WRITE_SECONDS = 0.1


def round_trip(rank_context: RankContext, subject: Subject, work: Fit) -> tuple[dict[str, Any], dict[str, Any]]:
    """Train and save, then load into a new module; return the saved state and the loaded one.

    Args:
        rank_context: This rank.
        subject: The strategy.
        work: ``save_to`` relative to the job's folder.
    """
    path = rank_context.folder / "checkpoint"
    saving, loading = _SaveLast(path), _LoadedState()
    make_trainer(rank_context, subject, work, [saving]).fit(NETS[work.net](work, subject.configure_model))
    trainer = make_trainer(rank_context, subject, work, [loading], max_epochs=work.epochs + 1)
    trainer.fit(NETS[work.net](work, subject.configure_model), ckpt_path=path)
    return saving.state, loading.state


def full_state(strategy: Any) -> dict[str, Any]:
    """Return the state of a strategy's module and optimizer as plain values; of the first rank; collective."""
    module = strategy.module_state_dict()
    optimizers = [strategy.optimizer_state(optimizer) for optimizer in strategy.optimizers]
    return {"module": _plain(module), "optimizer": _plain(optimizers)}


@dataclass(frozen=True, kw_only=True, slots=True)
class StateSize:
    """Bytes of a rank's state for a checkpoint.

    Attributes:
        declared: What the strategy declares that the rank holds.
        full: What a rank would hold if nothing was divided.
        returned: What the strategy returns.
        communicated: Tensors that torch.distributed sent or received for that.
    """

    declared: int
    full: int
    returned: int
    communicated: int


def state_sizes(
    rank_context: RankContext, subject: Subject, work: Fit
) -> tuple[MemoryLayout | None, dict[str, StateSize]]:
    """Train; return the memory that the strategy declares, and the sizes of a rank's state for a checkpoint.

    Args:
        rank_context: This rank.
        subject: The strategy.
        work: A training with AdamW in float32.
    """
    end = _StateSizes(rank_context.world_size)
    make_trainer(rank_context, subject, work, [end]).fit(NETS[work.net](work, subject.configure_model))
    return end.layout, end.sizes


class _StateSizes(Callback):
    """Records the declared memory, and the size of what the strategy returns for a portable checkpoint."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.layout: MemoryLayout | None = None
        self.sizes: dict[str, StateSize] = {}

    def on_train_end(self, trainer: Any, module: Any) -> None:
        strategy, work = trainer.strategy, module.shape
        numels = [parameter.numel() for parameter in NETS[work.net](work, None).parameters()]
        training = training_size(module, strategy, numels, self.world_size)
        self.layout, full = strategy.memory_layout(training), training.replicated
        if self.layout is None:
            return
        states = {
            "module": ("parameters", strategy.sharded_module_state),
            "optimizer": ("optimizer_state", lambda: list(map(strategy.sharded_optimizer_state, strategy.optimizers))),
        }
        for name, (field, state_of) in states.items():
            with RecordedCollectives() as recorded:
                state = state_of()
            self.sizes[name] = StateSize(
                declared=getattr(self.layout, field) + self.layout.host,
                full=getattr(full, field),
                returned=_num_bytes(state),
                communicated=sum(collective.bytes for collective in recorded.collectives),
            )


def step_collectives(
    rank_context: RankContext, subject: Subject, work: Fit
) -> tuple[CommunicationLayout | None, list[Collective]]:
    """Train; return what the strategy declares that a rank communicates in an optimizer step, and what it does.

    Args:
        rank_context: This rank.
        subject: The strategy.
        work: A training with AdamW in float32, of three optimizer steps at least.
    """
    third = _ThirdStep(rank_context.world_size)
    make_trainer(rank_context, subject, work, [third]).fit(NETS[work.net](work, subject.configure_model))
    return third.layout, third.recorded.collectives


class _ThirdStep(Callback):
    """Records the collectives of the third optimizer step: the first two allocate, and agree on shapes."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.layout: CommunicationLayout | None = None
        self.recorded = RecordedCollectives()

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:  # noqa: ARG002 - the hook's
        if batch_idx == 2 * module.shape.accumulate:
            net = NETS[module.shape.net](module.shape, None)  # not the one that is wrapped by now
            numels = [parameter.numel() for parameter in net.parameters()]
            training = training_size(net, trainer.strategy, numels, self.world_size)
            self.layout = trainer.strategy.communication_layout(training.for_steps_of(module.shape.accumulate))
            self.recorded.__enter__()  # type: ignore[no-untyped-call]  # of torch

    def on_train_batch_end(self, trainer: Any, module: Any, *hook_arguments: Any) -> None:  # noqa: ARG002 - likewise
        if hook_arguments[2] == 3 * module.shape.accumulate - 1:
            self.recorded.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # of torch


def training_size(module: torch.nn.Module, strategy: Any, numels: list[int], world_size: int) -> TrainingSize:
    """Return the size of a training with AdamW in float32, from the numbers of elements of the parameters."""
    size = torch.float32.itemsize
    return TrainingSize(
        module=module,
        precision=strategy.precision_plugin,
        device_type=strategy.root_device.type,
        world_size=world_size,
        ranks_per_machine=world_size,
        parameters=size * sum(numels),
        trainable_parameters=size * sum(numels),
        trainable_numel=sum(numels),
        largest_parameter=size * max(numels),
        module_buffers=0,
        optimizer_state=size * sum(2 * numel + 1 for numel in numels),  # two moments, and the number of steps
        optimizer_temporaries=0,
        timeline=((0, size * sum(numels)),),
    )


def _num_bytes(state: Any) -> int:
    """Return the size of a nested state's tensors in this process."""
    if isinstance(state, torch.Tensor | FlatShard):
        local = local_tensor(state)
        return local.numel() * local.element_size()
    children = state.values() if isinstance(state, dict) else state if isinstance(state, list | tuple) else ()
    return sum(map(_num_bytes, children))


def saves(rank_context: RankContext, subject: Subject, accelerator: str) -> dict[str, Any]:
    """Save, read and remove; return whether this rank wrote, and what it observed right after each step.

    Args:
        rank_context: This rank.
        subject: The strategy.
        accelerator: Alias of the accelerator.
    """
    path = rank_context.folder / "written"
    slow = _SlowIO()
    with open_strategy(rank_context, subject, accelerator, plugins=(slow,)) as strategy:
        strategy.save_checkpoint({"number": 5}, path)
        observed = {"wrote": slow.has_written, "is there": path.exists(), "read": strategy.load_checkpoint(path)}
        strategy.barrier("all have read it")
        strategy.remove_checkpoint(path)
        strategy.barrier("it is removed")
        return {**observed, "is gone": not path.exists()}


class _SlowIO(CheckpointIO):
    """Writes slowly, so that ranks that do not wait continue too early."""

    has_written = False

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path) -> None:
        self.has_written = True
        time.sleep(_WRITE_SECONDS)
        Path(path).write_text(json.dumps(checkpoint))

    def load_checkpoint(self, path: str | Path) -> dict[str, Any]:
        checkpoint: dict[str, Any] = json.loads(Path(path).read_text()) if Path(path).exists() else {}
        return checkpoint

    def remove_checkpoint(self, path: str | Path) -> None:
        Path(path).unlink()


class _SaveLast(Callback):
    """Saves after the last batch."""

    saves_checkpoints = runs_last = True

    def __init__(self, path: Path) -> None:
        self.path = path
        self.state: dict[str, Any] = {}

    @override
    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.is_last_batch:
            self.state = full_state(trainer.strategy)
            trainer.save_checkpoint(self.path)


class _LoadedState(Callback):
    """Records the loaded state, and stops the training."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}

    @override
    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.state = full_state(trainer.strategy)
        trainer.should_stop = True


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return numbers(value)
    if isinstance(value, dict):
        return {str(key): _plain(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(child) for child in value]
    return value


def _by_number(entries: list[Any]) -> dict[str, Any]:
    return {str(number): entry for number, entry in enumerate(entries)}


def differences(one: Mapping[str, Any], other: Mapping[str, Any], path: str = "") -> list[str]:
    """Return the paths of the entries in which two nested states differ."""
    differing = []
    for key in dict.fromkeys([*one, *other]):
        key_path = f"{path}.{key}" if path else str(key)
        first, second = one.get(key), other.get(key)
        if isinstance(first, dict) and isinstance(second, dict):
            differing += differences(first, second, key_path)
        elif isinstance(first, list) and isinstance(second, list) and first and isinstance(first[0], dict):
            differing += differences(_by_number(first), _by_number(second), key_path)
        elif first != second:
            differing.append(key_path)
    return differing


# Reuse of a module after its training: without the strategy, and in a second fit


_MEETING_SECONDS = 30.0  # for a rank that is much slower than others


def reuse(rank_context: RankContext, subject: Subject, work: Fit) -> tuple[str, list[float]] | None:
    """Train a module, compute its gradients by hand, and train it again.

    Args:
        rank_context: This rank.
        subject: The strategy.
        work: A training.

    Returns:
        The problem of the module without the strategy, and the losses of the second training;
        None where the module is sharded in any rank.
    """
    net = NETS[work.net](work, subject.configure_model)
    make_trainer(rank_context, subject, work, []).fit(net)
    is_complete = plain(net).keys() == dict(net.named_parameters()).keys()
    if "sharded" in rank_context.meet("trained", "whole" if is_complete else "sharded", seconds=_MEETING_SECONDS):
        return None
    problem = _problem_by_itself(net, NETS[work.net](work, None))
    net.losses.clear()
    make_trainer(rank_context, subject, work, []).fit(net)
    return problem, net.losses


def _problem_by_itself(net: Net, twin: Net) -> str:
    """Compare the gradients of a module with those of a plain module of the same values."""
    twin.load_state_dict(net.state_dict())
    try:
        actual, expected = _gradients(net), _gradients(twin)
    except Exception as error:  # noqa: BLE001 - whatever it is, the test tells of it
        return f"raises {type(error).__name__}: {error}"
    finally:
        net.zero_grad()
    differing = [name for name, gradient in expected.items() if not torch.allclose(actual[name], gradient)]
    return f"computes other gradients than a module with the same values, of {differing[0]}" if differing else ""


def _gradients(net: Net) -> dict[str, torch.Tensor]:
    inputs, targets, _ = dataset(GLOBAL_BATCH).tensors
    net.zero_grad()
    torch.nn.functional.mse_loss(net(inputs), targets).backward()
    return {name: value.grad for name, value in net.named_parameters() if value.grad is not None}


# Reference results of one device, cached


ONE_DEVICE = "single_device"


def one_device() -> Subject:
    """Return the reference strategy."""
    return Subject(component=get_catalog().find("strategy", ONE_DEVICE).component)


@lru_cache
def on_one_device(**options: Any) -> FitResult:
    """Return the result of a training on one device.

    Args:
        **options: Of :class:`~dstrat.testing.ranks.fits.Fit`; all of them can be hashed.
    """
    fitted: FitResult = run_in_team(fit, 1, subject=one_device(), work=Fit(**options))[0]
    return fitted
