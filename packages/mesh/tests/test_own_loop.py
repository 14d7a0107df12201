"""Loops of one's own with stages: losses, weights, accumulation and evaluation are those of one device."""

from functools import partial

import pytest
import torch
from packages.mesh.tests import context_fits, pipeline_fits
from tests.accelerators import ACCELERATOR
from tests.ranks import each, in_ranks
from torch import nn
from torch.utils.data import DataLoader

import dstrat
from dstrat import OwnLoop, Pipeline
from dstrat.errors import ConflictError, MisuseError
from dstrat.parallel.process_group import wait_for_all_ranks
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
        weight = weight[0].to(loss) if weight else torch.ones_like(loss)
        reduce = loop.strategy.reduce
        losses.append(float(reduce(loss.detach() * weight) / reduce(weight)))
    with loop.evaluation():
        batch = loop.strategy.batch_to_device(next(iter(DataLoader(fits.data(8), batch_size=8))))
        found = loop.compute(lambda *values: function(net, *values), *batch)
    return [*losses, float(found[0] if isinstance(found, tuple) else found)]


def launched(cluster, case, **options):
    strategy = MeshStrategy(**options)
    loop = OwnLoop(
        dstrat.build(strategy=strategy, accelerator=ACCELERATOR, devices=cluster.world_size, plugins=[cluster])
    )
    return loop.launch(train, **case)


CASES = {
    "plain": {"name": "plain"},
    "accumulated": {"name": "plain", "accumulate": 2},
    "weighted": {"name": "weighted"},
    "weighted and accumulated": {"name": "weighted", "accumulate": 5},
}


@pytest.mark.parametrize("sizes", [{"pp": 2}, {"pp": 2, "dp_shard": 2}], ids=str)
def test_losses_are_those_of_one_device(sizes):
    one_device = dstrat.build(strategy="single_device", accelerator=ACCELERATOR, devices=1)
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


def launched_function(cluster, function, **arguments):
    strategy = MeshStrategy(pp=2)
    loop = OwnLoop(
        dstrat.build(strategy=strategy, accelerator=ACCELERATOR, devices=cluster.world_size, plugins=[cluster])
    )
    return loop.launch(globals()[function], **arguments)


def test_several_optimizers_are_refused():
    for message in in_ranks(launched_function, function="two_optimizers"):
        assert message == (
            "MeshStrategy runs forward and backward passes together here, for all parameters, and setup made 2 "
            "optimizers: put the parameters into groups of one"
        )


class Shared(nn.Module):
    """Has a weight in the first and in the last stage."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(*(nn.Linear(6, 6, bias=False) for _ in range(4)))
        self.net[3].weight = self.net[0].weight

    def configure_pipeline(self):
        return Pipeline(model=self.net, loss=lambda output, batch: nn.functional.mse_loss(output[:, :3], batch[1]))


def two_losses_for_a_step(loop):
    net, losses = Shared(), []
    loop.setup(net, sgd, gradient_clip_val=0.5)
    shares = loop.strategy.distributed_sampler_kwargs.get("num_replicas", 1)
    for batch in loop.training_loader(DataLoader(pipeline_fits.data(48), batch_size=8 // shares)):
        loss = loop.compute(lambda inputs, targets: nn.functional.mse_loss(net.net(inputs)[:, :3], targets), *batch)
        loop.backward(loss)
        losses.append(float(loop.strategy.reduce(loss.detach())))
        if len(losses) % 2 == 0:
            loop.step()
    return losses


@pytest.mark.parametrize("ranks", [2, 4])
def test_gradients_of_a_shared_weight_are_summed_until_the_step(ranks):
    one_device = dstrat.build(strategy="single_device", accelerator=ACCELERATOR, devices=1)
    expected = OwnLoop(one_device).launch(two_losses_for_a_step)
    for found in in_ranks(launched_function, ranks, function="two_losses_for_a_step"):
        assert found == pytest.approx(expected, rel=1e-6)


# Gradients of compute belong to the backward that follows it


def batches(loop):
    return iter(loop.training_loader(DataLoader(pipeline_fits.data(40), batch_size=8)))


def set_up(loop, **options):
    net = pipeline_fits.Net()
    loop.setup(net, sgd, **options)
    return lambda *values: plain(net, *values)


def losses_without_a_batch(loop, spoil):
    """Train with four batches; between the first two comes another one, whose loss is not finite, if it spoils."""
    function, losses = set_up(loop), []
    for index, (inputs, targets) in enumerate(batches(loop)):
        if index == 1 and not spoil:
            continue
        loss = loop.compute(function, inputs * torch.inf if index == 1 else inputs, targets)
        if not loss.isfinite():
            continue
        loop.backward(loss)
        loop.step()
        losses.append(float(loss))
    return losses


def test_a_batch_without_backward_leaves_no_gradients():
    cases = {spoil: {"function": "losses_without_a_batch", "spoil": spoil} for spoil in (True, False)}
    for found in in_ranks(each, function=launched_function, cases=cases):
        assert len(found[True]) == 4
        assert found[True] == found[False]


def scaled(loop, loss):
    loop.backward(loss() * 0.1)


def weight_of_the_loop(loop, loss):
    loop.backward(loss(), weight=8)


def same_loss_twice(loop, loss):
    first = loss()
    loop.backward(first)
    loop.backward(first)


def a_second_batch(loop, loss):
    loop.backward(loss())
    loss()
    loss()


def a_step_with_another_batch(loop, loss):
    loop.backward(loss())
    loss()
    loop.step()


def accumulated(loop, loss):
    loss()
    loss()


def refusal(loop, wrong, **options):
    function, remaining = set_up(loop, **options), batches(loop)
    with pytest.raises(MisuseError) as error:
        globals()[wrong](loop, lambda: loop.compute(function, *next(remaining)))
    return str(error.value)


OTHER = "backward got something else than compute returned last, for which MeshStrategy has computed the gradients"
ADDED = "compute has added the gradients of a batch to those of others"
WRONG = {
    "scaled": OTHER,
    "weight_of_the_loop": OTHER,
    "same_loss_twice": OTHER,
    "a_second_batch": ADDED,
    "a_step_with_another_batch": ADDED,
    "accumulated": ADDED,
}


def test_gradients_that_are_not_those_of_the_loop_are_refused():
    cases = {wrong: {"function": "refusal", "wrong": wrong} for wrong in WRONG}
    cases["accumulated"]["accumulate_grad_batches"] = 2
    for found in in_ranks(each, function=launched_function, cases=cases):
        for wrong, message in found.items():
            assert message.startswith(WRONG[wrong])


# A step that fails


class FailsOnce(nn.Linear):
    """Raises an error in its second forward pass."""

    passes = 0

    def forward(self, x):
        self.passes += 1
        if self.passes == 2:
            raise ValueError("bad sample")
        return super().forward(x)


def error_of(step):
    """Return the message of the error that a step raises; None if it does not."""
    try:
        step()
    except (ValueError, MisuseError) as error:
        return str(error)
    return None


def go_on_after_a_failed_step(loop):
    """Fail in the first rank between two microbatches, and in the last one before it receives any, and go on."""
    net = pipeline_fits.Net()
    net.net[0] = FailsOnce(net.net[0].in_features, net.net[0].out_features)
    loop.setup(net, sgd)
    loaded, errors = list(batches(loop)), ["bad batch"]
    if loop.global_rank == 0:
        errors = [error_of(partial(loop.compute, partial(plain, net), *batch)) for batch in loaded]
    wait_for_all_ranks("go on")
    raise ValueError(errors)


def fail_and_train_again(cluster):
    with pytest.raises(ValueError, match="bad") as failure:
        launched_function(cluster, "go_on_after_a_failed_step")
    errors = failure.value.args[0]
    return errors, launched(cluster, CASES["plain"], pp=2)


def test_a_step_that_failed_between_stages_is_the_last_one_of_its_run_but_not_of_the_processes():
    one_device = dstrat.build(strategy="single_device", accelerator=ACCELERATOR, devices=1)
    expected = OwnLoop(one_device).launch(train, **CASES["plain"])
    (first, losses), (last, losses_of_last) = in_ranks(fail_and_train_again)
    assert first[0] == "bad sample"
    assert len(first) == 5
    assert all(error.startswith("a step has failed between its stages") for error in first[1:])
    assert last == ["bad batch"]
    assert losses == losses_of_last == pytest.approx(expected, rel=1e-6)
