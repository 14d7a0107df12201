"""Time of a training step: a TrainModule, and the same module as a LightningModule, in turns in one process.

python step_time.py [ROUNDS]
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
import warnings

warnings.filterwarnings("ignore")

import lightning.pytorch as pl  # noqa: E402
import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

import dstrat  # noqa: E402

torch.set_num_threads(1)
STEPS = 600


def net(base):
    class Net(base):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 2))
            self.times = []

        def training_step(self, batch, batch_idx):
            self.times.append(time.perf_counter())
            loss = nn.functional.cross_entropy(self.layers(batch[0]), batch[1])
            self.log("loss", loss)
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Net()


def step_time(base):
    """Return the median time of a step, in microseconds."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(8 * STEPS, 32), torch.randint(0, 2, (8 * STEPS,)))
    off = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False, "logger": False}
    module = net(base)
    dstrat.Trainer(accelerator="cpu", devices=1, max_epochs=1, **off).fit(module, DataLoader(data, batch_size=8))
    times = module.times[50:]
    return 1e6 * statistics.median(b - a for a, b in itertools.pairwise(times))


def main(rounds):
    step_time(dstrat.TrainModule)
    pairs = [(step_time(dstrat.TrainModule), step_time(pl.LightningModule)) for _ in range(rounds)]
    for ours, theirs in pairs:
        print(f"TrainModule {ours:.1f} us, LightningModule {theirs:.1f} us, ratio {theirs / ours:.3f}")
    print(f"median ratio {statistics.median(theirs / ours for ours, theirs in pairs):.3f}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if sys.argv[1:] else 7)
