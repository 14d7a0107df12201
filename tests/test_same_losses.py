"""Every strategy, on any number of ranks, gives the losses of one device."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dstrat import Callback, Trainer, TrainModule
from dstrat.plugins.catalog import get_catalog

STEPS = 20
GLOBAL_BATCH = 16


class Classifier(TrainModule):
    """A small network with dropout switched off, so that only the strategy can make a difference."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 5))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self.layers(x), y)
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Losses(Callback):
    """Keeps the loss of each epoch, which is one global batch long."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        self.losses.append(float(trainer.callback_metrics["loss"]))

    def state_dict(self) -> dict[str, Any]:
        return {"losses": self.losses}

    def load_state_dict(self, state_dict: Any) -> None:
        self.losses = state_dict["losses"]


def train(module: TrainModule, *, strategy: str, devices: int, accumulate: int, clip: float | None) -> list[float]:
    torch.manual_seed(5)
    x = torch.randn(GLOBAL_BATCH, 12)
    data = TensorDataset(x, x[:, :5].argmax(1))
    losses = Losses()
    trainer = Trainer(
        accelerator="cpu",
        strategy=strategy,
        devices=devices,
        max_epochs=STEPS,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=clip,
        callbacks=losses,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    batch_size = GLOBAL_BATCH // trainer.plan.world_size // accumulate
    trainer.fit(copy.deepcopy(module), DataLoader(data, batch_size=batch_size, shuffle=True))
    return losses.losses


@pytest.fixture(scope="module")
def module() -> TrainModule:
    torch.manual_seed(0)
    return Classifier()


def strategies_of_functions() -> list[str]:
    """The installed strategies that run here; those that run a whole script are tried as programs elsewhere."""
    found = []
    for offer in get_catalog().offers("strategy"):
        facts = offer.component
        on_cpu = not facts.accelerators or "cpu" in facts.accelerators
        runs_script = facts.starts_processes and facts.options.get("start_method", "popen") in ("popen", "spawn")
        if on_cpu and not runs_script and facts.max_devices != 1:
            found.append(facts.alias)
    return found


@pytest.fixture(scope="module")
def expected(module: TrainModule) -> dict[float | None, list[float]]:
    """The losses of one device, without and with clipping."""
    return {clip: train(module, strategy="single_device", devices=1, accumulate=1, clip=clip) for clip in (None, 0.1)}


@pytest.mark.parametrize(("devices", "accumulate", "clip"), [(1, 1, None), (2, 1, None), (4, 1, None), (2, 2, 0.1)])
@pytest.mark.parametrize("strategy", strategies_of_functions())
def test_the_losses_are_those_of_one_device(
    module: TrainModule,
    expected: dict[float | None, list[float]],
    strategy: str,
    devices: int,
    accumulate: int,
    clip: float | None,
) -> None:
    losses = train(module, strategy=strategy, devices=devices, accumulate=accumulate, clip=clip)
    assert len(losses) == STEPS
    assert losses[-1] < losses[0] / 2
    assert losses == pytest.approx(expected[clip], rel=1e-6)
