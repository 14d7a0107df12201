"""Train with hydra, which reads the arguments, changes the working directory and configures logging."""

from __future__ import annotations

from pathlib import Path

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig  # noqa: TC002 - hydra looks at the program
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dstrat import Trainer, TrainModule


class Net(TrainModule):
    """A line, with all that hydra read as its hyperparameters."""

    def __init__(self, cfg: DictConfig) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(2, 1)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return nn.functional.mse_loss(self.layer(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.hparams.cfg.optimizer.lr)


@hydra.main(version_base=None, config_path=".", config_name="config")
def main(cfg: DictConfig) -> None:
    """Train, and write what each process saw."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(16, 2), torch.randn(16, 1))
    trainer = Trainer(accelerator="cpu", enable_model_summary=False, **cfg.trainer)
    trainer.fit(Net(cfg), DataLoader(data, batch_size=2))
    folder = Path(HydraConfig.get().runtime.output_dir)
    seen = f"{trainer.world_size} {trainer.global_step} {Path.cwd() == folder}\n{folder}"
    (Path(cfg.notes) / f"{cfg.optimizer.lr} {trainer.global_rank}").write_text(seen)


if __name__ == "__main__":
    main()
