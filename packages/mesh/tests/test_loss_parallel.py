"""Losses over split logits, and activations that layers divide over the tokens, as torchtitan has them."""

from contextlib import nullcontext

import pytest
import torch
from tests.ranks import each, in_ranks
from tests.trainer_runs import quiet_trainer
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.utils.data import DataLoader

from dstrat import Pipeline, TrainModule
from dstrat_mesh import MeshStrategy

TOKENS = 16


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mlp = nn.RMSNorm(8), MLP()

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class Language(TrainModule):
    """Predicts tokens; logits are whole, or split over the tokens that they are of."""

    def __init__(self, weighted=False):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Embedding(TOKENS, 8), Block(), Block(), nn.Linear(8, TOKENS, bias=False))
        self.weighted, self.losses = weighted, []

    def configure_model(self):
        if getattr(self.trainer.strategy, "tensor_parallel_size", 1) == 1:
            return
        mesh = self.device_mesh["tp"]
        split = {
            "0": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "3": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
        }
        for index in ("1", "2"):
            split |= {
                f"{index}.norm": SequenceParallel(),
                f"{index}.mlp": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
                f"{index}.mlp.up": ColwiseParallel(),
                f"{index}.mlp.down": RowwiseParallel(output_layouts=Shard(1)),
            }
        parallelize_module(self.net, mesh, split)

    @staticmethod
    def loss(output, batch):
        return nn.functional.cross_entropy(output.flatten(0, 1), batch.roll(1, 1).flatten())

    def configure_pipeline(self):
        return Pipeline(model=self.net, loss=self.loss)

    def training_step(self, batch, batch_idx):
        loss = self.loss(self.net(batch), batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return {"loss": loss, "weight": batch.numel()} if self.weighted else loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        strategy, loss = self.trainer.strategy, outputs["loss"]
        self.losses.append(float(strategy.reduce(loss)))
        assert strategy.all_gather(loss).mean() == pytest.approx(self.losses[-1])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class InParallel(Language):
    """Has torch's context where it is needed: in the step, and in its backward pass."""

    def training_step(self, batch, batch_idx):
        with loss_parallel():
            return super().training_step(batch, batch_idx)

    def backward(self, loss, *args, **kwargs):
        with loss_parallel():
            super().backward(loss, *args, **kwargs)


def losses(cluster, module_class=Language, weighted=False, data_ranks=1, **layout):
    module = module_class(weighted)
    trainer = quiet_trainer("single_device" if cluster is None else MeshStrategy(**layout), cluster)
    texts = torch.randint(TOKENS, (48, 12), generator=torch.Generator().manual_seed(1))
    # Around a fit it serves pipelines too, whose passes are no method of the module.
    context = nullcontext() if cluster is None or module_class is InParallel else loss_parallel()
    with context:
        trainer.fit(module, DataLoader(texts, batch_size=8 // data_ranks))
    return module.losses


CASES = {
    2: [{"tp": 2, "module_class": InParallel}, {"tp": 2, "module_class": InParallel, "weighted": True}, {"tp": 2}],
    4: [{"tp": 2, "pp": 2}, {"tp": 2, "data_ranks": 2, "weighted": True}],
}


@pytest.mark.parametrize("ranks", CASES)
def test_losses_over_split_logits_are_those_of_one_device(ranks):
    expected = pytest.approx(losses(None), rel=1e-6, abs=0)
    cases = {str(case): case for case in CASES[ranks]}
    for found in in_ranks(each, ranks, function=losses, cases=cases):
        assert found == dict.fromkeys(cases, expected)
