"""Layers in the wrappers of torch.compile and checkpoint_wrapper: their names stay out of checkpoints."""

import warnings
from itertools import product

import pytest
import torch
from tests.ranks import each, in_ranks
from tests.trainer_runs import quiet_trainer
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.data import DataLoader

from dstrat import Pipeline, TrainModule
from dstrat_fsdp import FSDPStrategy
from dstrat_mesh import MeshStrategy


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)
        self.register_buffer("scale", torch.ones(6))

    def forward(self, x):
        return x + self.scale * self.down(torch.tanh(self.up(x)))


class Net(TrainModule):
    def __init__(self, wraps, path=None):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 6), *[Block() for _ in range(4)], nn.Linear(6, 1))
        self.wraps, self.path, self.losses = wraps, path, []

    def configure_model(self):
        for index in range(1, 5) if self.wraps else ():
            # A hook that gathers or checks parameters within the graph would break it.
            self.net[index] = torch.compile(checkpoint_wrapper(self.net[index]), backend="eager", fullgraph=True)

    def loss(self, output, batch):
        return (output - batch.sum(1, keepdim=True)).square().mean()

    def configure_pipeline(self):
        return Pipeline(model=self.net, loss=self.loss)

    def training_step(self, batch, batch_idx):
        return self.loss(self.net(batch), batch)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.losses.append(float(self.trainer.strategy.reduce(outputs["loss"].detach())))
        if self.path is not None and batch_idx in (2, 3):  # between two batches of an optimizer step, and after it
            self.trainer.save_checkpoint(self.path.with_suffix(f".{batch_idx}"))

    def configure_optimizers(self):
        return torch.optim.Adagrad(self.parameters(), lr=0.05)  # whose state exists before the first step


STRATEGIES = {
    "one device": (lambda: "single_device", 8),
    "fsdp": (FSDPStrategy, 4),
    "stages": (lambda: MeshStrategy(pp=2), 8),
}


def fitted(cluster, strategy, wraps, path=None, ckpt_path=None):
    # Dynamo looks at the gradient of what an earlier layer has computed.
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf Tensor")
    make, batch_size = STRATEGIES[strategy]
    inputs = torch.randn(48, 6, generator=torch.Generator().manual_seed(1))
    module = Net(wraps, path)
    quiet_trainer(make(), cluster, accumulate_grad_batches=2).fit(
        module, DataLoader(inputs, batch_size=batch_size), ckpt_path=ckpt_path
    )
    return module.losses


def test_checkpoints_move_between_wrapped_and_plain_layers(tmp_path):
    expected = fitted(None, "one device", wraps=False)
    kinds = list(product(("fsdp", "stages"), (True, False)))
    saves = {kind: {"strategy": kind[0], "wraps": kind[1], "path": tmp_path / "{} {}".format(*kind)} for kind in kinds}
    for found in in_ranks(each, function=fitted, cases=saves):
        assert found == dict.fromkeys(kinds, pytest.approx(expected, rel=1e-6))
    loads = {
        (saved, (strategy, wraps)): {
            "strategy": strategy,
            "wraps": wraps,
            # A rank's gradients of a batch that has no step yet stay in the same layout.
            "ckpt_path": saves[saved]["path"].with_suffix(f".{2 if saved[0] == strategy else 3}"),
        }
        for saved, (strategy, wraps) in product(kinds, kinds)
        if saved[1] != wraps
    }
    for found in in_ranks(each, function=fitted, cases=loads):
        for moved, losses in found.items():
            assert losses == pytest.approx(expected[-len(losses) :], rel=1e-6), moved
    for saved in kinds:
        losses = fitted(None, "one device", wraps=not saved[1], ckpt_path=saves[saved]["path"].with_suffix(".3"))
        assert losses == pytest.approx(expected[-len(losses) :], rel=1e-6)
