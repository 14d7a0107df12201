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

from dstrat.checkpoint.portable.checkpoint_io import PortableCheckpointIO
from dstrat.checkpoint.torch_file import TorchCheckpointIO
from dstrat.interfaces.checkpoint_io import CheckpointIO
from dstrat.plugins.catalog import get_catalog
from dstrat.testing.ranks.jobs import Subject, opened, run_in_team
from dstrat.testing.ranks.modules import GLOBAL_BATCH, NETS, Net, dataset
from dstrat.training.callbacks.callback import Callback
from dstrat.training.trainer import Trainer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dstrat.testing.ranks.team import Place


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
        precision: The flag.
        accelerator: Where.
        stop_at: Optimizer steps after which it stops; -1 goes to the end.
        save_to: Where a checkpoint is saved at the end, or at ``save_at``.
        save_at: Optimizer steps after which it is saved.
        resume_from: A checkpoint from which it goes on.
        checkpoint_format: What writes it.
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
class Fitted:
    """What came of a training in one rank.

    Attributes:
        losses: The rank's own loss of each batch.
        seen: The samples of each batch.
        state: The whole state of the module before the end, by name, flattened; of the first rank, others may lack it.
        own: The same of the module that the user has after the end.
        steps: Number of optimizer steps.
        rates: The learning rates in each batch, one for each group of parameters, where the module notes them.
        drawn: A random number, after the last step.
        buffers: The rank's own buffers before the end, by name, flattened.
        validated: What each validation has logged, by name.
    """

    losses: list[float]
    seen: list[list[int]]
    state: dict[str, list[float]]
    own: dict[str, list[float]]
    steps: int
    rates: list[list[float]]
    drawn: float
    buffers: dict[str, list[float]]
    validated: list[dict[str, float]]


def fit(place: Place, subject: Subject, work: Fit) -> Fitted:
    """Train, in each rank."""
    net = NETS[work.net](work, subject.configure_model, place.rank)
    end = _End(work)
    trainer = make_trainer(place, subject, work, [end])
    trainer.fit(net, ckpt_path=work.resume_from)
    return Fitted(
        losses=net.losses,
        seen=net.seen,
        state=end.state,
        own=plain(net),
        steps=trainer.global_step,
        rates=getattr(net, "rates", []),
        drawn=end.drawn,
        buffers=end.buffers,
        validated=end.validated,
    )


def fit_twice(place: Place, subject: Subject, work: Fit) -> tuple[Fitted, Fitted | str]:
    """Train two modules one after the other in the same processes; an error in the second is a text."""
    return fit(place, subject, work), try_fit(place, subject, work)


def fit_after_breaking(place: Place, subject: Subject, work: Fit) -> tuple[str, Fitted | str]:
    """Train a module that raises in every rank, and then a good one; return the error, and what came of the other."""
    broken = try_fit(place, subject, replace(work, net="breaking"))
    return str(broken) if isinstance(broken, str) else "", try_fit(place, subject, work)


def try_fit(place: Place, subject: Subject, work: Fit) -> Fitted | str:
    """Train; return what came of it, or the error."""
    try:
        return fit(place, subject, work)
    except Exception as error:  # noqa: BLE001 - whatever it is, the test looks at it
        return f"{type(error).__name__}: {error}"


def evaluate(place: Place, subject: Subject, work: Fit) -> dict[str, Any]:
    """Validate, test and predict; return what was logged and predicted, and which samples ran."""
    found: dict[str, Any] = {}
    for name in ("validate", "test", "predict"):
        net = NETS[work.net](work, subject.configure_model)
        results = getattr(make_trainer(place, subject, work, []), name)(net) or []
        predicted = [number for batch in results for number in batch.tolist()] if name == "predict" else None
        found[name] = dict(results[0]) if predicted is None else predicted, net.seen
    return found


def make_trainer(place: Place, subject: Subject, work: Fit, callbacks: list[Callback], **arguments: Any) -> Trainer:
    """Return a Trainer with nothing around the training."""
    starts = subject.component.starts_processes
    plugins = [*([place.cluster] if starts else []), _FORMATS[work.checkpoint_format]()]
    given = {
        "strategy": subject.make(),
        "accelerator": work.accelerator,
        "devices": place.world_size * subject.devices_per_process,
        "precision": work.precision,
        "plugins": plugins,
        "max_epochs": work.epochs,
        "max_steps": work.stop_at,
        "accumulate_grad_batches": work.accumulate,
        "gradient_clip_val": work.clip,
        "gradient_clip_algorithm": work.algorithm,
        "num_sanity_val_steps": 0,
        "limit_val_batches": 0 if callbacks and not work.validate_every else None,
        "val_check_interval": work.validate_every or None,
        "logger": False,
        "callbacks": callbacks,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "default_root_dir": place.folder,
    }
    return Trainer(**{**given, **arguments})


def plain(module: torch.nn.Module) -> dict[str, list[float]]:
    """Return the parameters of a module as lists; what is sharded still, or only on another rank, is left out."""
    here = {name: value for name, value in module.named_parameters() if not value.is_meta}
    return {name: numbers(value) for name, value in here.items() if type(value.data) is torch.Tensor}


def numbers(tensor: torch.Tensor) -> list[float]:
    """Return the numbers of a tensor, which lose nothing on the way."""
    listed: list[float] = tensor.detach().cpu().double().flatten().tolist()
    return [number if math.isfinite(number) else math.nan for number in listed]


class _End(Callback):
    """Keeps the whole state of the module at the end, and saves a checkpoint where it is asked for."""

    saves_checkpoints = runs_last = True

    def __init__(self, work: Fit) -> None:
        self.work = work
        self.state: dict[str, list[float]] = {}
        self.buffers: dict[str, list[float]] = {}
        self.validated: list[dict[str, float]] = []
        self.drawn = 0.0

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:  # noqa: ARG002 - the hook's
        if self.work.save_to is not None and trainer.global_step == self.work.save_at and not self.was_saved:
            trainer.save_checkpoint(Path(self.work.save_to))

    @property
    def was_saved(self) -> bool:
        """Whether the checkpoint is there."""
        return self.work.save_to is not None and Path(self.work.save_to).exists()

    def on_validation_end(self, trainer: Any, module: Any) -> None:  # noqa: ARG002 - the hook's
        self.validated.append({name: float(value) for name, value in trainer.callback_metrics.items()})

    def on_fit_end(self, trainer: Any, module: Any) -> None:
        state = trainer.strategy.module_state_dict()
        self.state = {name: numbers(value) for name, value in state.items() if isinstance(value, torch.Tensor)}
        self.buffers = {name: numbers(value) for name, value in module.named_buffers()}
        self.drawn = float(torch.rand(()))


# Saving and loading in a rank of the kit's, and what is there afterwards.


_MOMENT = 0.1  # seconds


def round_trip(place: Place, subject: Subject, work: Fit) -> tuple[dict[str, Any], dict[str, Any]]:
    """Train a little and save, then load into a new module; return the state at the one moment and at the other.

    Args:
        place: This rank.
        subject: The strategy.
        work: ``save_to`` relative to the job's folder.
    """
    path = place.folder / "checkpoint"
    saving, loading = _Saving(path), _Looking()
    make_trainer(place, subject, work, [saving]).fit(NETS[work.net](work, subject.configure_model))
    trainer = make_trainer(place, subject, work, [loading], max_epochs=work.epochs + 1)
    trainer.fit(NETS[work.net](work, subject.configure_model), ckpt_path=path)
    return saving.state, loading.state


def whole_state(strategy: Any) -> dict[str, Any]:
    """Return the state of a strategy's module and optimizer as plain values; of the first rank; collective."""
    module = strategy.module_state_dict()
    optimizers = [strategy.optimizer_state(optimizer) for optimizer in strategy.optimizers]
    return {"module": _plain(module), "optimizer": _plain(optimizers)}


def saves(place: Place, subject: Subject, accelerator: str) -> dict[str, Any]:
    """Save, read and remove; return whether this rank wrote, and what it found at once after each of the three.

    Args:
        place: This rank.
        subject: The strategy.
        accelerator: Where.
    """
    path = place.folder / "written"
    slow = _Slow()
    with opened(place, subject, accelerator, plugins=(slow,)) as strategy:
        strategy.save_checkpoint({"number": 5}, path)
        found = {"wrote": slow.has_written, "is there": path.exists(), "read": strategy.load_checkpoint(path)}
        strategy.barrier("all have read it")
        strategy.remove_checkpoint(path)
        strategy.barrier("it is removed")
        return {**found, "is gone": not path.exists()}


class _Slow(CheckpointIO):
    """Takes a moment to write, in which ranks that do not wait go on."""

    has_written = False

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path) -> None:
        self.has_written = True
        time.sleep(_MOMENT)
        Path(path).write_text(json.dumps(checkpoint))

    def load_checkpoint(self, path: str | Path) -> dict[str, Any]:
        checkpoint: dict[str, Any] = json.loads(Path(path).read_text()) if Path(path).exists() else {}
        return checkpoint

    def remove_checkpoint(self, path: str | Path) -> None:
        Path(path).unlink()


class _Saving(Callback):
    """Saves after the last batch."""

    saves_checkpoints = runs_last = True

    def __init__(self, path: Path) -> None:
        self.path = path
        self.state: dict[str, Any] = {}

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:  # noqa: ARG002 - the hook's
        if trainer.is_last_batch:
            self.state = whole_state(trainer.strategy)
            trainer.save_checkpoint(self.path)


class _Looking(Callback):
    """Looks at what was loaded, and lets training end."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}

    def on_train_start(self, trainer: Any, module: Any) -> None:  # noqa: ARG002 - the hook's
        self.state = whole_state(trainer.strategy)
        trainer.should_stop = True


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return numbers(value)
    if isinstance(value, dict):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return value


def _by_number(entries: list[Any]) -> dict[str, Any]:
    return {str(number): entry for number, entry in enumerate(entries)}


def differences(one: Mapping[str, Any], other: Mapping[str, Any], path: str = "") -> list[str]:
    """Return the places where two nested states differ."""
    found = []
    for key in dict.fromkeys([*one, *other]):
        place = f"{path}.{key}" if path else str(key)
        left, right = one.get(key), other.get(key)
        if isinstance(left, dict) and isinstance(right, dict):
            found += differences(left, right, place)
        elif isinstance(left, list) and isinstance(right, list) and left and isinstance(left[0], dict):
            found += differences(_by_number(left), _by_number(right), place)
        elif left != right:
            found.append(place)
    return found


# Scenario of a module after its training: run without the strategy, retrained.


_PATIENCE = 30.0  # seconds for a rank that is much slower than others


def use_again(place: Place, subject: Subject, work: Fit) -> tuple[str, list[float]] | None:
    """Train a module, compute its gradients by hand, and train it again.

    Args:
        place: This rank.
        subject: The strategy.
        work: A training.

    Returns:
        What was wrong with it by itself, and the losses of the second training; None where
        the module is sharded, in any rank.
    """
    net = NETS[work.net](work, subject.configure_model)
    make_trainer(place, subject, work, [NoCallback()]).fit(net)
    is_whole = plain(net).keys() == dict(net.named_parameters()).keys()
    if "sharded" in place.meet("trained", "whole" if is_whole else "sharded", seconds=_PATIENCE):
        return None
    problem = _problem_by_itself(net, NETS[work.net](work, None))
    net.losses.clear()
    make_trainer(place, subject, work, [NoCallback()]).fit(net)
    return problem, net.losses


def _problem_by_itself(net: Net, twin: Net) -> str:
    """Compare a module with one of the same values that no strategy has seen."""
    twin.load_state_dict(net.state_dict())
    try:
        found, expected = _gradients(net), _gradients(twin)
    except Exception as error:  # noqa: BLE001 - whatever it is, the test tells of it
        return f"raises {type(error).__name__}: {error}"
    finally:
        net.zero_grad()
    differing = [name for name, gradient in expected.items() if not torch.allclose(found[name], gradient)]
    return f"computes other gradients than a module with the same values, of {differing[0]}" if differing else ""


def _gradients(net: Net) -> dict[str, torch.Tensor]:
    inputs, targets, _ = dataset(GLOBAL_BATCH).tensors
    net.zero_grad()
    torch.nn.functional.mse_loss(net(inputs), targets).backward()
    return {name: value.grad for name, value in net.named_parameters() if value.grad is not None}


class NoCallback(Callback):
    """Keeps the Trainer from validating."""


# Reference results of one device, computed once.


ONE_DEVICE = "single_device"


def one_device() -> Subject:
    """Return the strategy that everything is compared with."""
    return Subject(component=get_catalog().find("strategy", ONE_DEVICE).component)


@lru_cache
def on_one_device(**options: Any) -> Fitted:
    """Return what a training gives on one device.

    Args:
        **options: Of :class:`~dstrat.testing.ranks.fits.Fit`; all of them can be hashed.
    """
    fitted: Fitted = run_in_team(fit, 1, subject=one_device(), work=Fit(**options))[0]
    return fitted
