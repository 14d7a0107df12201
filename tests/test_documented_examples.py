"""The programs of the documents that the project started from, with our import names."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from dstrat import Callback, CheckpointIO, StrategyRegistry, Trainer, TrainModule
from dstrat_ddp import DDPStrategy

if TYPE_CHECKING:
    from collections.abc import Iterator

QUIET: dict[str, Any] = {
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
    "max_epochs": 1,
}


class Net(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.ones(8, 4)), batch_size=2)


@pytest.fixture
def registered() -> Iterator[list[str]]:
    aliases: list[str] = []
    yield aliases
    for alias in aliases:
        StrategyRegistry.remove(alias)


def test_a_strategy_registered_with_a_custom_checkpoint_io_saves_through_it(
    tmp_path: Path, registered: list[str]
) -> None:
    class CustomCheckpointIO(CheckpointIO):
        def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path) -> None:
            torch.save(checkpoint["state_dict"], Path(path).with_suffix(".custom"))

        def load_checkpoint(self, path: str | Path) -> dict[str, Any]:
            return {"state_dict": torch.load(Path(path).with_suffix(".custom"))}

    custom_checkpoint_io = CustomCheckpointIO()

    # Register the DDP Strategy with your custom CheckpointIO plugin
    StrategyRegistry.register(
        "ddp_custom_checkpoint_io",
        DDPStrategy,
        description="DDP Strategy with custom checkpoint io plugin",
        checkpoint_io=custom_checkpoint_io,
        start_method="fork",
    )
    registered.append("ddp_custom_checkpoint_io")

    class Save(Callback):
        def on_fit_end(self, trainer: Trainer, module: TrainModule) -> None:
            trainer.save_checkpoint(tmp_path / "model.ckpt")

    trainer = Trainer(strategy="ddp_custom_checkpoint_io", accelerator="cpu", devices=2, callbacks=Save(), **QUIET)
    assert trainer.strategy.checkpoint_io is custom_checkpoint_io
    net = Net()
    trainer.fit(net)
    saved = torch.load(tmp_path / "model.custom")
    assert torch.equal(saved["layer.weight"], net.layer.weight)
    assert StrategyRegistry.get("ddp_custom_checkpoint_io")
    assert "ddp_custom_checkpoint_io" in StrategyRegistry.available_strategies()


def test_a_custom_ddp_strategy_wraps_and_sets_up_in_its_own_way() -> None:
    class MyCustomDistributedDataParallel(DistributedDataParallel):
        pass

    class CustomDDPStrategy(DDPStrategy):
        def configure_ddp(self) -> None:
            self.model = MyCustomDistributedDataParallel(self.model, device_ids=self.device_ids)

        def setup(self, trainer: Any) -> None:
            # you can access the accelerator and plugins directly
            self.accelerator.setup()
            self.precision_plugin.connect(self.module)
            super().setup(trainer)

    class Check(Callback):
        def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
            assert type(trainer.model) is MyCustomDistributedDataParallel

    strategy = CustomDDPStrategy(start_method="fork")
    trainer = Trainer(strategy=strategy, accelerator="cpu", devices=2, callbacks=Check(), **QUIET)
    trainer.fit(Net())
    assert trainer.global_step == 2
