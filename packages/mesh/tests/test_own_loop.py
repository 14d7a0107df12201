"""Loops of one's own with stages: losses, weights, accumulation and evaluation are those of one device."""

import pytest
import torch
from packages.mesh.tests import context_fits, pipeline_fits
from tests.ranks import each, in_ranks
from torch import nn
from torch.utils.data import DataLoader

import dstrat
from dstrat import OwnLoop
from dstrat.errors import ConflictError
from dstrat_mesh import MeshStrategy


def plain(net, inputs, targets):
    return nn.functional.mse_loss(net.net(inputs), targets)


def weighted(net, *batch):
    return context_fits.loss(net.net(net.inputs(batch)), batch), context_fits.count(batch)


def sgd(net):
    return torch.optim.SGD(net.parameters(), lr=0.2)  # whose steps grow with the gradients


FUNCTIONS = {"plain": (pipeline_fits, plain), "weighted": (context_fits, weighted)}


def train(loop, name, accumulate=1):
    """Return the losses of all batches, and that of an evaluation."""
    (fits, function), losses = FUNCTIONS[name], []
    net, shares = fits.Net(), loop.strategy.distributed_sampler_kwargs.get("num_replicas", 1)
    loop.setup(net, sgd, accumulate_grad_batches=accumulate, gradient_clip_val=0.5)
    for batch in loop.training_loader(DataLoader(fits.data(40), batch_size=8 // shares)):
        found = loop.compute(lambda *values: function(net, *values), *batch)
        loss, *weight = found if isinstance(found, tuple) else (found,)
        loop.backward(loss, *weight)
        loop.step()
        weight = weight[0].float() if weight else torch.ones(())
        reduce = loop.strategy.reduce
        losses.append(float(reduce(loss.detach() * weight) / reduce(weight)))
    with loop.evaluation():
        batch = next(iter(DataLoader(fits.data(8), batch_size=8)))
        found = loop.compute(lambda *values: function(net, *values), *batch)
    return [*losses, float(found[0] if isinstance(found, tuple) else found)]


def launched(cluster, case, **options):
    strategy = MeshStrategy(**options)
    loop = OwnLoop(dstrat.build(strategy=strategy, accelerator="cpu", devices=cluster.world_size, plugins=[cluster]))
    return loop.launch(train, **case)


CASES = {
    "plain": {"name": "plain"},
    "accumulated": {"name": "plain", "accumulate": 2},
    "weighted": {"name": "weighted"},
    "weighted and accumulated": {"name": "weighted", "accumulate": 5},
}


@pytest.mark.parametrize("sizes", [{"pp": 2}, {"pp": 2, "dp_shard": 2}], ids=str)
def test_losses_are_those_of_one_device(sizes):
    one_device = dstrat.build(strategy="single_device", accelerator="cpu", devices=1)
    expected = {
        name: pytest.approx(OwnLoop(one_device).launch(train, **case), rel=1e-6) for name, case in CASES.items()
    }
    cases = {name: {"case": case, **sizes} for name, case in CASES.items()}
    for found in in_ranks(each, 4 if "dp_shard" in sizes else 2, function=launched, cases=cases):
        assert found == expected


def two_optimizers(loop):
    with pytest.raises(ConflictError) as error:
        loop.setup(
            pipeline_fits.Net(), lambda net: [torch.optim.SGD(layer.parameters(), 0.1) for layer in net.net[:3:2]]
        )
    return str(error.value)


def refused(cluster):
    loop = OwnLoop(dstrat.build(strategy=MeshStrategy(pp=2), accelerator="cpu", devices=2, plugins=[cluster]))
    return loop.launch(two_optimizers)


def test_several_optimizers_are_refused():
    for message in in_ranks(refused):
        assert message == (
            "MeshStrategy runs forward and backward passes together here, for all parameters, and setup made 2 "
            "optimizers: put the parameters into groups of one"
        )
