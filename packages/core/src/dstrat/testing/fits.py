"""Trainings and evaluations through the Trainer, in a rank of the kit's; what came of them as plain values."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from dstrat.builtin.checkpoint.portable.checkpoint_io import PortableCheckpointIO
from dstrat.builtin.checkpoint.torch_file import TorchCheckpointIO
from dstrat.testing.modules import NETS
from dstrat.training.callbacks.callback import Callback
from dstrat.training.trainer import Trainer

if TYPE_CHECKING:
    from dstrat.testing.place import Place
    from dstrat.testing.subject import Subject

_FORMATS = {"portable": PortableCheckpointIO, "torch": TorchCheckpointIO}


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """A training.

    Attributes:
        net: Which module, see :data:`~dstrat.testing.modules.NETS`.
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
