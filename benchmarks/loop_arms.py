"""The arms of the loop's measurements: one tiny training on one device, by hand, with dstrat and with Lightning.

All arms read the same DataLoader and train the same network, and run one right after the other in one process.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import io
import logging
import sys
import tempfile
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, Dataset
from workload import WORKLOADS, Net, loss_of, make_dataset, make_optimizer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    OnStep = Callable[[int], None]
    Arm = Callable[[int, OnStep], None]

WORKLOAD = WORKLOADS["tiny"]


class Samples(Dataset[Any]):
    """As many samples as are asked for, out of a few that are in memory: long trainings need no more than short ones.

    Args:
        number: Number of samples.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self._samples = list(make_dataset(WORKLOAD, 512))

    def __len__(self) -> int:
        return self._number

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        sample: tuple[Tensor, ...] = self._samples[index % 512]
        return sample


def loader(batches: int) -> DataLoader[Any]:
    """Return what every arm reads."""
    return DataLoader(Samples(batches * WORKLOAD.batch_size), batch_size=WORKLOAD.batch_size)


def train_by_hand(steps: int, on_step: OnStep) -> None:
    """Train as one writes it with torch alone."""
    network = Net(WORKLOAD, on_step)
    optimizer = make_optimizer("sgd", network)
    network.train()
    for batch in loader(steps):
        loss = loss_of(network, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def validate_by_hand(batches: int, on_step: OnStep) -> None:
    """Sum up the loss, weighted by the size of the batch."""
    network = Net(WORKLOAD, on_step)
    total, samples = torch.zeros(()), 0
    data = loader(batches)  # not in inference mode, whose tensors are cheaper to collate than others
    network.eval()
    with torch.inference_mode():
        for batch in data:
            size = len(batch[0])
            total += size * loss_of(network, batch)
            samples += size
    assert total / samples > 0


def training_arms(*, logs: bool, defaults: bool, with_peer: bool) -> dict[str, Arm]:
    """Return the arms of a training.

    Args:
        logs: Whether two values are logged in each step, one of them also over the epoch.
        defaults: Whether there are a progress bar, a checkpoint callback and a CSV logger, as by default.
        with_peer: Whether Lightning takes part.
    """

    def arm(framework: str) -> Arm:
        def train(steps: int, on_step: OnStep) -> None:
            base, trainer = _classes(framework)
            with tempfile.TemporaryDirectory() as folder, _without_output():
                arguments = _with_defaults(framework, folder) if defaults else _bare()
                module = _module(base, on_step, logs=logs)
                trainer(accelerator="cpu", devices=1, max_epochs=1, default_root_dir=folder, **arguments).fit(
                    module, loader(steps)
                )

        return train

    frameworks = ["dstrat", *(["lightning"] if with_peer else [])]
    return {"by hand": train_by_hand} | {framework: arm(framework) for framework in frameworks}


def validation_arms(*, with_peer: bool) -> dict[str, Arm]:
    """Return the arms of a validation whose mean loss is logged."""

    def arm(framework: str) -> Arm:
        def validate(batches: int, on_step: OnStep) -> None:
            base, trainer = _classes(framework)
            with _without_output():
                trainer(accelerator="cpu", devices=1, **_bare()).validate(_module(base, on_step), loader(batches))

        return validate

    frameworks = ["dstrat", *(["lightning"] if with_peer else [])]
    return {"by hand": validate_by_hand} | {framework: arm(framework) for framework in frameworks}


def has_peer() -> bool:
    """Whether Lightning is installed here."""
    return importlib.util.find_spec("lightning") is not None


def let_go() -> None:
    """Free what an arm has left, so that the next one doesn't do it."""
    gc.collect()


def _module(base: Any, on_step: OnStep, *, logs: bool = False) -> Any:
    class Module(base):  # type: ignore[misc]  # of dstrat or of Lightning
        def __init__(self) -> None:
            super().__init__()
            self.network = Net(WORKLOAD, on_step)

        def validation_step(self, batch: Any, batch_idx: int) -> None:  # noqa: ARG002 - not needed
            self.log("val_loss", loss_of(self.network, batch))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return make_optimizer("sgd", self.network)

    class Silent(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:  # noqa: ARG002 - not needed
            return loss_of(self.network, batch)

    class Logging(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:  # noqa: ARG002 - not needed
            loss = loss_of(self.network, batch)
            self.log("step_loss", loss)
            self.log("loss", loss, on_step=True, on_epoch=True)
            return loss

    return Logging() if logs else Silent()


def _classes(framework: str) -> tuple[type, Any]:
    if framework == "dstrat":
        import dstrat

        return dstrat.TrainModule, dstrat.Trainer
    import lightning

    warnings.filterwarnings("ignore", module="lightning")
    for name in ("lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.ERROR)
    return lightning.LightningModule, lightning.Trainer


def _bare() -> dict[str, Any]:
    return {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }


def _with_defaults(framework: str, folder: str) -> dict[str, Any]:
    """Return nothing but a CSV logger for Lightning, whose default depends on what is installed."""
    if framework == "dstrat":
        return {}
    from lightning.pytorch.loggers import CSVLogger

    return {"logger": CSVLogger(folder)}


@contextlib.contextmanager
def _without_output() -> Iterator[None]:
    """Let nobody see the progress, which is made all the same."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        yield
    sys.stdout.flush()
