"""Samples that ranks gather come once, on whatever axes ranks share a batch."""

import pytest
import torch
from packages.mesh.tests import context_fits
from tests.accelerators import ACCELERATOR
from tests.ranks import each, in_ranks
from tests.trainer_runs import quiet_trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dstrat
from dstrat import OwnLoop
from dstrat.errors import MisuseError
from dstrat_mesh import MeshStrategy

WIDTH = context_fits.WIDTH


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, WIDTH, WIDTH) / 4)

    def forward(self, tokens, index, weights):
        computed = torch.einsum("tw,tkwo->tko", tokens, self.weight[index])
        return (computed * weights.unsqueeze(-1)).sum(1)


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, 4), Experts()

    def forward(self, x):
        weights, index = self.router(x).softmax(-1).topk(2)
        return x + self.experts(x.flatten(0, 1), index.flatten(0, 1), weights.flatten(0, 1)).view_as(x)


class Net(context_fits.Net):
    """Gathers the numbers of samples, and the largest of their logits."""

    def __init__(self):
        super().__init__()
        self.net[2] = Mixture()
        self.steps = []

    def configure_experts(self):
        return [self.net[2].experts]

    def validation_step(self, batch, batch_idx):
        logits, strategy = self.net(self.inputs(batch)), self.trainer.strategy
        if getattr(strategy, "axes", None) is not None:
            logits = strategy.join_sequences(logits)
        gathered = self.all_gather({"samples": batch[3], "largest": logits.amax((1, 2)), "number": batch_idx})
        assert torch.equal(strategy.all_gather(batch[3]), gathered["samples"])
        self.steps.append(gathered)


def numbered(size=8):
    return TensorDataset(*context_fits.data(size).tensors, torch.arange(size))


def evaluated(cluster, readers=1, **options):
    """Return the shapes of what a step gathers, and the pairs that all steps do."""
    strategy = MeshStrategy(**options) if cluster else "single_device"
    module, trainer = Net(), quiet_trainer(strategy, cluster)
    trainer.validate(module, DataLoader(numbered(), batch_size=4 // readers))
    samples, largest = (torch.cat([step[name].flatten() for step in module.steps]) for name in ("samples", "largest"))
    pairs = zip(samples.tolist(), largest.tolist(), strict=True)
    return {name: tuple(value.shape) for name, value in module.steps[0].items()}, sorted(pairs)


LAYOUTS = {
    2: {
        "tp": {"tp": 2},
        "pp": {"pp": 2},
        "cp": {"cp": 2},
        "ring": {"cp": 2, "context_parallel": "ring"},
        "ep": {"ep": 2, "readers": 2},
    },
    4: {
        "tp and shards": {"tp": 2, "dp_shard": 2, "readers": 2},
        "tp and replicas": {"tp": 2, "dp_replicate": 2, "readers": 2},
        "pp and shards": {"pp": 2, "dp_shard": 2, "readers": 2},
        "cp and shards": {"cp": 2, "dp_shard": 2, "readers": 2},
        "cp and replicas": {"cp": 2, "dp_replicate": 2, "readers": 2},
        "ep and cp": {"ep": 2, "cp": 2, "dp_shard": 2, "readers": 2},
        "replicas of shards": {"dp_replicate": 2, "dp_shard": 2, "readers": 4},
    },
}


@pytest.mark.parametrize("world_size", LAYOUTS)
def test_each_sample_comes_once(world_size):
    _, expected = evaluated(None)
    for found in in_ranks(each, world_size, function=evaluated, cases=LAYOUTS[world_size]):
        for name, (shapes, pairs) in found.items():
            readers = LAYOUTS[world_size][name].get("readers", 1)
            of_samples = readers, 4 // readers
            assert shapes == {"samples": of_samples, "largest": of_samples, "number": (readers,)}
            assert pairs == [(sample, pytest.approx(largest, rel=1e-5)) for sample, largest in expected]


class GathersParts(Net):
    def validation_step(self, batch, batch_idx):
        logits = self.net(self.inputs(batch))
        self.steps.append(self.all_gather(logits.amax((1, 2)), group=torch.distributed.group.WORLD))
        self.all_gather(logits.amax((1, 2)))


def refused(cluster):
    module, trainer = GathersParts(), quiet_trainer(MeshStrategy(cp=2), cluster)
    with pytest.raises(MisuseError) as error:
        trainer.validate(module, DataLoader(numbered(), batch_size=4))
    return len(module.steps), module.steps[0].shape, str(error.value)


def test_values_of_some_tokens_are_not_taken_for_those_of_samples():
    for num_steps, shape, message in in_ranks(refused):
        assert (num_steps, shape) == (1, (2, 4))
        assert message.startswith("all_gather got other values on the 2 ranks of cp, which share each batch")


def gradient(loop):
    """Return a gradient through what ranks gather, each of which multiplies it by other factors."""
    reader = loop.strategy.distributed_sampler_kwargs["rank"]
    device = loop.strategy.root_device
    leaf = torch.full((2,), float(reader), requires_grad=True, device=device)
    gathered = loop.all_gather(leaf, sync_grads=True)
    (gathered * torch.tensor([[1.0], [10.0]], device=device) * (reader + 1)).sum().backward()
    return gathered.tolist(), leaf.grad.tolist()


def launched(cluster, **options):
    strategy = MeshStrategy(**options)
    return OwnLoop(
        dstrat.build(strategy=strategy, accelerator=ACCELERATOR, devices=cluster.world_size, plugins=[cluster])
    ).launch(gradient)


def test_gradients_flow_back_from_other_batches():
    cases = {axis: {axis: 2, "dp_shard": 2} for axis in ("tp", "pp", "cp")}
    cases["tp with replicas"] = {"tp": 2, "dp_replicate": 2}
    found = in_ranks(each, 4, function=launched, cases=cases)
    for axis in cases:
        assert [of_rank[axis][0] for of_rank in found] == 4 * [[[0.0, 0.0], [1.0, 1.0]]]
        # Each of the two readers has the factors of both, 1 and 2, for its own row.
        assert sorted(of_rank[axis][1] for of_rank in found) == 2 * [[3.0, 3.0]] + 2 * [[30.0, 30.0]]
