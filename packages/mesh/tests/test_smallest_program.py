"""The smallest program with a pipeline, beside the same with ddp."""

import re

import pytest
from tests.warm_program import WarmProgram

DDP = """\
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from dstrat import Trainer, TrainModule

class Net(TrainModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))

    def training_step(self, batch, batch_idx):
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

if __name__ == "__main__":
    torch.manual_seed(0)
    inputs = torch.randn(64, 8)
    loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=16)
    Trainer(strategy="ddp", accelerator="cpu", devices=2, max_epochs=2).fit(Net(), loader)
"""
PIPELINE = """\
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from dstrat import Pipeline, Trainer, TrainModule

class Net(TrainModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))

    def training_step(self, batch, batch_idx):
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_pipeline(self):
        return Pipeline(model=self.net, loss=lambda output, batch: nn.functional.mse_loss(output, batch[1]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

if __name__ == "__main__":
    torch.manual_seed(0)
    inputs = torch.randn(64, 8)
    loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=16)
    Trainer(strategy="mesh(pp=2)", accelerator="cpu", devices=2, max_epochs=2).fit(Net(), loader)
"""
ONE_DEVICE = PIPELINE.replace('strategy="mesh(pp=2)"', 'strategy="single_device"').replace("devices=2", "devices=1")


def test_a_pipeline_takes_at_most_six_lines_more_than_ddp():
    assert len(PIPELINE.splitlines()) - len(DDP.splitlines()) <= 6
    # Nothing else is written anew: the import, and the strategy.
    assert len(set(DDP.splitlines()) - set(PIPELINE.splitlines())) == 2


def last_loss(folder, text):
    folder.mkdir()
    (folder / "train.py").write_text(text)
    program = WarmProgram(folder / "train.py")
    _, shown = program.communicate(timeout=120)
    assert program.returncode == 0, shown
    return re.search(r"trained 2 epochs, \d+ steps, in .*: loss ([\d.]+)", shown)[1]


@pytest.mark.slow
def test_both_programs_train(tmp_path):
    pytest.importorskip("dstrat_ddp")
    assert last_loss(tmp_path / "ddp", DDP)
    assert last_loss(tmp_path / "pipeline", PIPELINE) == last_loss(tmp_path / "one", ONE_DEVICE)
