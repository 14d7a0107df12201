"""``dstrat verify`` on each axis: right modules pass, and of wrong ones the first layer or parameter is named."""

import json

import pytest
import torch
from click.testing import CliRunner
from packages.mesh.tests import context_fits
from packages.mesh.tests.test_experts import WIDTH, Mixture
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

from dstrat import Pipeline, TrainModule
from dstrat.cli.main import commands

pytestmark = pytest.mark.slow


class Handwritten(context_fits.Attention):
    """Attends by products of its own, of which a rank has those of its tokens."""

    def forward(self, x):
        query = self.query(x)
        scores = query @ query.mT
        after = torch.ones_like(scores, dtype=torch.bool).triu(1)
        return x + self.out(scores.masked_fill(after, float("-inf")).softmax(-1) @ query)


class Dropping(context_fits.Attention):
    """Has dropout of functions."""

    def forward(self, x):
        heads = (layer(x).unflatten(-1, (-1, 4)).transpose(1, 2) for layer in (self.query, *self.pair))
        attended = functional.scaled_dot_product_attention(*heads, dropout_p=0.3, is_causal=True, enable_gqa=True)
        return x + functional.dropout(self.out(attended.transpose(1, 2).flatten(2)), 0.3, self.training)


class Half(context_fits.Net):
    """Has one layer whose attention is not torch's."""

    def __init__(self):
        super().__init__()
        self.net[3] = Handwritten()


class Twice(context_fits.Net):
    """Adds the bias of one layer, which tp splits, on each rank again."""

    def configure_model(self):
        super().configure_model()
        if getattr(self.trainer.strategy, "tensor_parallel_size", 1) > 1:
            self.net[3].out.register_forward_hook(lambda layer, _inputs, output: output + layer.bias.to_local())


def sequences():
    module = context_fits.Net()
    module.net[3] = Dropping()
    return module, context_fits.data(8)[:]


def half():
    return Half(), context_fits.data(8)[:]


def twice():
    return Twice(), context_fits.data(8)[:]


class Mixtures(TrainModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(6, WIDTH), *(Mixture() for _ in range(6)), nn.Linear(WIDTH, 3))

    def training_step(self, batch, batch_idx):
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_experts(self):
        return [layer.experts for layer in self.net if isinstance(layer, Mixture)]

    def configure_pipeline(self):
        return Pipeline(model=self.net, loss=lambda output, batch: nn.functional.mse_loss(output, batch[1]))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def mixtures():
    inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(2))
    return Mixtures(), (inputs, inputs[:, :3])


class Split(TrainModule):
    """Needs a mesh, as the module of the guide does, and has targets that are columns."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.up, self.down = nn.Linear(6, 16), nn.Linear(16, 1)

    def configure_model(self):
        parallelize_module(self, self.device_mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})

    def training_step(self, batch, batch_idx):
        return functional.mse_loss(self.down(torch.tanh(self.up(batch[0]))), batch[1])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def split():
    inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(2))
    return Split(), (inputs, inputs.sum(1, keepdim=True))


def verify(factory, strategy, *options):
    arguments = ["verify", f"{__name__}:{factory}", "--strategy", strategy, *options]
    shown = CliRunner().invoke(commands, arguments)
    assert isinstance(shown.exception, SystemExit | None), shown.exception
    return shown


RIGHT = [
    ("sequences", "mesh(pp=2)"),
    ("sequences", "mesh(pp=2, schedule='InterleavedZeroBubble')"),
    ("sequences", "mesh(tp=2)"),
    ("sequences", "mesh(cp=2)"),
    ("mixtures", "mesh(ep=2)"),
]


@pytest.mark.parametrize(("factory", "strategy"), RIGHT)
def test_a_right_module_is_the_same_on_each_axis(factory, strategy):
    layers = ["--layers", "2"] if factory == "mixtures" else []
    shown = verify(factory, strategy, "--json", *layers)
    assert shown.exit_code == 0, shown.output
    result = json.loads(shown.stdout)
    assert all(one["compared"] > 5 for one in result["comparisons"][:3])
    assert result["reduced"] == ({"net": [8, 4]} if layers else {})


WRONG = [("half", "mesh(cp=2)", "net.3.out"), ("twice", "mesh(tp=2)", "net.3.out")]


@pytest.mark.parametrize(("factory", "strategy", "layer"), WRONG)
def test_the_first_wrong_layer_is_named(factory, strategy, layer):
    shown = verify(factory, strategy)
    assert shown.exit_code == 1
    last = f"{strategy} on 2 CPU processes is not the same as one device, first in outputs of layers: {layer!r}"
    assert shown.stdout.splitlines()[-1] == last


def test_a_module_that_needs_a_mesh_is_compared_with_one_rank_of_the_strategy():
    shown = verify("split", "mesh(tp=2)", "--devices", "4")
    assert shown.exit_code == 0, shown.output
