"""Memory of a rank that each algorithm asks for, beside that of the training."""

import pytest
import torch
from tests.hand_loop import Net, parts, start, train
from tests.ranks import each, in_ranks
from torch import nn

from dstrat_bagua import BaguaStrategy
from dstrat_bagua.buckets import GradientExchange


def bytes_of_copies(cluster, **options):
    """Return how many weights an algorithm holds copies of, over those that are trained, after some steps."""
    strategy = BaguaStrategy(**options)
    start(strategy, Net(), parts(cluster))
    train(strategy, steps=3)
    algorithm = strategy.algorithm
    averaging = getattr(algorithm, "_averaging", None)
    flats = [bucket.flat for bucket in getattr(algorithm, "_buckets", [])]
    flats += [tensor for copies in getattr(algorithm, "_copies", []) for tensor in vars(copies).values()]
    if averaging is not None:
        flats += [copy.flat for copy in averaging._copies] + averaging._averages
    weights = sum(parameter.numel() for parameter in strategy.module.parameters())
    has_buckets = strategy._gradients is not None
    strategy.teardown()
    return sum(flat.numel() for flat in flats) / weights, has_buckets, algorithm.weight_copies


@pytest.mark.parametrize("warmup_steps", [0, 2])
def test_an_algorithm_of_weights_has_the_copies_that_it_declares_and_no_buckets_of_gradients(warmup_steps):
    cases = {
        "decentralized": {"algorithm": "decentralized"},
        "low_precision_decentralized": {"algorithm": "low_precision_decentralized", "hierarchical": False},
        "async": {"algorithm": "async", "warmup_steps": warmup_steps},
    }
    for outcomes in in_ranks(each, function=bytes_of_copies, cases=cases):
        for name, (copies, has_buckets, declared) in outcomes.items():
            assert (copies, has_buckets) == (declared, False), name


class Arrived:
    """An exchange that has ended."""

    def wait(self):
        pass


@pytest.mark.parametrize("flatten", [True, False])
def test_gradients_are_freed_while_the_backward_pass_computes_others(flatten):
    net = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512))  # a bucket for each layer
    started, are_views = [], []

    def start(bucket):
        started.append(bucket)
        return Arrived()

    def compare(_):
        gradient, flat = net[1].weight.grad, started[0].flat
        are_views.append(gradient.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr())

    exchange = GradientExchange([[*net.named_parameters()]], start, flatten=flatten, find_unused=None)
    net[0].weight.register_post_accumulate_grad_hook(compare)
    with exchange.during_backward():
        net(torch.ones(2, 512)).sum().backward()
    assert are_views == [flatten]
    assert len(started) == 2
