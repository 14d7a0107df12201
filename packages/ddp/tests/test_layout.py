"""The buckets of gradients have one layout from the first step on."""

import pytest
import torch
from tests.hand_loop import Net, parts, start
from tests.ranks import in_ranks
from torch import nn

from dstrat_ddp import DDPStrategy


def layouts(cluster):
    """Return the gradients when the module has been wrapped, and whether the first step knows the layout."""
    strategy = DDPStrategy()
    start(strategy, Net(), parts(cluster))
    gradients = [parameter.grad for parameter in strategy.module.parameters()]
    is_known = strategy.model.reducer._rebuild_buckets()  # what its next forward pass begins with
    strategy.teardown()
    return gradients, is_known


def test_the_layout_is_known_before_the_first_step_and_no_gradient_is_left():
    for gradients, is_known in in_ranks(layouts):
        assert gradients == [None] * len(gradients)
        assert is_known


class Hooked(Net):
    def __init__(self):
        super().__init__()
        self.calls = 0
        next(self.parameters()).register_post_accumulate_grad_hook(self.count)

    def count(self, parameter):
        self.calls += 1


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(8, 2, sparse=True)

    def training_step(self, batch):
        return self.table(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def calls_of_hooks(cluster):
    strategy = DDPStrategy()
    start(strategy, Hooked(), parts(cluster))
    calls = strategy.module.calls
    strategy.teardown()
    return calls


def test_hooks_of_the_user_are_not_called_before_the_first_step():
    assert in_ranks(calls_of_hooks) == [0, 0]


def sparse_gradients(cluster):
    strategy = DDPStrategy()
    start(strategy, Sparse(), parts(cluster))
    strategy.backward(strategy.training_step(torch.tensor([cluster.global_rank])))
    gradient = strategy.module.table.weight.grad.to_dense()
    strategy.teardown()
    return gradient


@pytest.mark.on_cpu  # NCCL sends no sparse tensors
def test_sparse_gradients_are_averaged():
    for gradient in in_ranks(sparse_gradients):
        assert gradient[:2].tolist() == [[0.5, 0.5], [0.5, 0.5]]
