"""Gradients: which are exchanged and when, and what is refused."""

import pytest
import torch
import torch.distributed as dist
from tests.hand_loop import Net, batches, one_pass, parts, share, single_device_losses, start, train
from tests.ranks import each, in_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

from dstrat.builtin.single_device import SingleDeviceStrategy
from dstrat.errors import MisuseError
from dstrat.parallel.separate_modules import SeparateModules
from dstrat_bagua import Algorithm, BaguaStrategy


class Summed(Algorithm):
    """An algorithm of a third party, which looks at when it is called."""

    def setup(self, replica):
        super().setup(replica)
        self.computed = []

    def reduce_gradients(self, bucket):
        parameters = self.replica.parameters.values()
        self.computed.append(sum(parameter.grad is not None for parameter in parameters))
        return dist.all_reduce(bucket.flat, async_op=True)


class Wide(Net):
    """Layers of 2.4 MB, so that there are several buckets."""

    def make_layers(self):
        self.layers = nn.Sequential(nn.Linear(6, 800), nn.Linear(800, 800), nn.Linear(800, 800), nn.Linear(800, 3))


def starts_of_exchanges(cluster):
    strategy = BaguaStrategy(algorithm=Summed())
    module = Wide()
    start(strategy, module, parts(cluster))
    [batch] = batches(1)
    inputs, targets = share(strategy, batch)
    [*expected] = torch.autograd.grad(module.training_step((inputs, targets), 0), module.parameters())
    one_pass(strategy, batch, 0, 1)
    summed = all(
        torch.allclose(strategy.reduce(one, reduce_op="sum"), parameter.grad, rtol=1e-4, atol=1e-6)
        for one, parameter in zip(expected, module.parameters(), strict=True)
    )
    views = {parameter.grad.untyped_storage().data_ptr() for parameter in module.parameters()}
    strategy.teardown()
    return summed, strategy.algorithm.computed, len(views)


def test_an_algorithm_of_ones_own_gets_buckets_while_the_backward_pass_runs():
    for summed, computed, storages in in_ranks(starts_of_exchanges):
        assert summed
        assert len(computed) == storages > 1  # gradients are views of the buckets
        assert computed == sorted(computed)
        assert computed[0] < 8 == computed[-1]


class SometimesUnused(Net):
    """A layer that the first rank never uses, and one that none does."""

    def __init__(self):
        super().__init__()
        self.second_only, self.unused = nn.Linear(3, 3), nn.Linear(3, 3)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss if dist.get_rank() == 0 else loss + self.second_only(batch[1]).square().mean()


def unused(cluster, **options):
    strategy = BaguaStrategy(**options)
    start(strategy, SometimesUnused(), parts(cluster))
    try:
        one_pass(strategy, next(batches(1)), 0, 1)
        gradients = {name: parameter.grad for name, parameter in strategy.module.named_parameters()}
        same = all(bool((strategy.all_gather(one) == one).all()) for one in gradients.values() if one is not None)
        return sorted(name for name, one in gradients.items() if one is None), same
    except MisuseError as error:
        strategy.on_exception(error)
        return str(error)
    finally:
        strategy.teardown()


@pytest.mark.parametrize("algorithm", ["gradient_allreduce", "bytegrad"])
def test_unused_parameters_are_left_alone_where_they_are_searched_for(algorithm):
    for lacking, same in in_ranks(unused, algorithm=algorithm, find_unused_parameters=True):
        assert lacking == ["unused.bias", "unused.weight"]
        assert same


def test_unused_parameters_are_named():
    first, second = in_ranks(unused)
    assert first.startswith("the loss does not depend on unused.bias, unused.weight, second_only.bias, second_only.w")
    assert second.startswith("the loss does not depend on unused.bias, unused.weight, and bagua exchanges")
    assert "BaguaStrategy(find_unused_parameters=True)" in first


class Unfrozen(Net):
    def __init__(self):
        super().__init__()
        self.layers[0].requires_grad_(False)

    def training_step(self, batch, batch_idx):
        if batch_idx == 5:
            self.layers[0].requires_grad_(True)
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def losses_unfrozen(cluster, algorithm="gradient_allreduce"):
    strategy = BaguaStrategy(algorithm)
    start(strategy, Unfrozen(), parts(cluster))
    try:
        losses = []
        for index, batch in enumerate(batches(10)):
            if index == 5:
                strategy.module.layers[0].requires_grad_(True)
            strategy.optimizers[0].zero_grad()
            loss = strategy.optimizer_step(
                strategy.optimizers[0], lambda batch=batch, index=index: one_pass(strategy, batch, index, 1)
            )
            losses.append(float(strategy.reduce(loss)))
        return losses
    except MisuseError as error:
        return str(error)
    finally:
        strategy.teardown()


def test_parameters_may_be_unfrozen_where_gradients_are_exchanged():
    expected = single_device_losses(Unfrozen(), steps=10)
    assert in_ranks(losses_unfrozen) == [pytest.approx(expected, rel=1e-5)] * 2
    for message in in_ranks(losses_unfrozen, algorithm="decentralized"):
        assert message.startswith("'layers.0.weight' was frozen when the training began and is not any more, and Dec")


class SparseNet(Net):
    def make_layers(self):
        self.layers = nn.Sequential(nn.Linear(6, 3))
        self.table = nn.Embedding(5, 3, sparse=True)

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + self.table(torch.tensor([1, 2])).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Reentrant(Net):
    def make_layers(self):
        self.layers, self.shared = nn.Sequential(nn.Linear(6, 600)), nn.Linear(600, 600)  # a bucket of its own

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        hidden = self.layers(inputs)
        for _ in range(2):
            hidden = checkpoint(self.shared, hidden, use_reentrant=True)
        return (hidden[:, :3] - targets).square().mean()


class ByItself(Net):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        loss.backward()
        return loss


def refused(cluster, module):
    strategy = BaguaStrategy()
    start(strategy, module(), parts(cluster))
    optimizer = strategy.optimizers[0]

    def closure():
        if module is ByItself:
            return strategy.training_step(share(strategy, next(batches(1))), 0)
        return one_pass(strategy, next(batches(1)), 0, 1)

    try:
        strategy.optimizer_step(optimizer, closure)
    except MisuseError as error:
        strategy.on_exception(error)
        return str(error)
    finally:
        strategy.teardown()
    return "accepted"


def test_what_cannot_be_exchanged_is_refused():
    words = {
        SparseNet: "the gradient of 'table.weight' is sparse, and buckets hold dense ones: create the layer with",
        Reentrant: "was computed twice in one backward pass, and had been exchanged before the second time",
        ByItself: "was computed without the strategy, so that it was not exchanged: call self.manual_backward(loss)",
    }
    for messages in in_ranks(each, function=refused, cases={module: {"module": module} for module in words}):
        for module, text in words.items():
            assert text in messages[module], module


def turns(cluster, algorithm):
    """Train two modules in turn, of which each step uses one."""
    torch.manual_seed(0)
    modules = {"one": nn.Linear(6, 3), "other": nn.Linear(6, 3)}
    both = SeparateModules(modules)
    both.configure_optimizers = lambda: torch.optim.SGD(both.parameters(), lr=0.1)
    strategy = BaguaStrategy(algorithm)
    start(strategy, both, parts(cluster))
    for index, batch in enumerate(batches(6)):
        inputs, targets = share(strategy, batch)
        both.zero_grad()
        module = modules["one" if index % 2 else "other"]
        strategy.backward((module(inputs) - targets).square().mean())
        assert all(
            (parameter.grad is not None) == (used is module)
            for used in modules.values()
            for parameter in used.parameters()
        )
        strategy.optimizers[0].step()
    weights = [parameter.detach().clone() for parameter in both.parameters()]
    same = all(bool((strategy.all_gather(one) == one).all()) for one in weights)
    strategy.teardown()
    return same


@pytest.mark.parametrize("algorithm", ["gradient_allreduce", "bytegrad"])
def test_modules_that_take_turns_need_not_all_have_gradients(algorithm):
    assert in_ranks(turns, algorithm=algorithm) == [True, True]


def accumulated(cluster, algorithm):
    strategy = BaguaStrategy(algorithm)
    start(strategy, Net(), parts(cluster))
    losses = train(strategy, steps=5, accumulate=4, clip=0.1)
    strategy.teardown()
    return losses


def test_gradients_are_exchanged_once_for_accumulated_batches_and_then_clipped():
    expected = single_device_losses(Net(), steps=5, accumulate=4, clip=0.1)
    cases = {name: {"algorithm": name} for name in ("gradient_allreduce", "bytegrad")}  # exact on one machine
    for losses in in_ranks(each, function=accumulated, cases=cases):
        assert losses == dict.fromkeys(cases, pytest.approx(expected, rel=1e-5))


class TwoLosses(Net):
    """Two optimizers, each with a loss of its layers alone, stepped inside the training step."""

    def __init__(self):
        super().__init__()
        self.other = nn.Linear(6, 3)
        self.strategy = None

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        losses = []
        for module, optimizer in zip((self.layers, self.other), self.optimizers, strict=True):
            loss = nn.functional.mse_loss(module(inputs), targets)
            self.strategy.backward(loss)
            self.strategy.optimizer_step(optimizer, lambda: None)
            if batch_idx % 2:  # gradients of the other optimizer stay
                optimizer.zero_grad()
            losses.append(loss.detach())
        return torch.stack(losses)


def manual_losses(strategy, given):
    module = TwoLosses()
    start(strategy, module, given)
    module.strategy = strategy
    module.optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (module.layers, module.other)]
    losses = [
        strategy.reduce(strategy.training_step(share(strategy, batch), index)).tolist()
        for index, batch in enumerate(batches(6))
    ]
    strategy.teardown()
    return losses


def manual_losses_of_ranks(cluster):
    return manual_losses(BaguaStrategy(find_unused_parameters=True), parts(cluster))


def test_backward_passes_inside_a_step_leave_the_gradients_of_other_parameters():
    expected = manual_losses(SingleDeviceStrategy(), parts())
    for losses in in_ranks(manual_losses_of_ranks):
        assert losses == [pytest.approx(one, rel=1e-5) for one in expected]
