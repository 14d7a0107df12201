"""Two processes with one XLA device each, which average gradients on the host."""

from __future__ import annotations

import torch
from packages.xla.tests.rank_fits import begin, counts, fit, loader
from packages.xla.tests.xla_fit import ON_CPU, Regression, data, trainer
from tests.ranks import in_ranks

from dstrat import seed_everything
from dstrat_xla import XLAStrategy


def parameters_after(batch_size, **arguments):
    """Train with validation, and return the parameters, which come back from the ranks to this process."""
    seed_everything(3, verbose=False)
    module = Regression(scheduled=True)
    loaders = data(batch_size=batch_size, shuffle=False), data(24, shuffle=False, batch_size=batch_size)
    trainer(accumulate_grad_batches=2, gradient_clip_val=0.5, **arguments).fit(module, *loaders)
    return module.state_dict()


def test_two_processes_train_as_one_device():
    expected = parameters_after(8, **ON_CPU)
    strategy = XLAStrategy(reduce_on_host=True, start_method="forkserver")
    trained = parameters_after(4, strategy=strategy, devices=2)
    for name, value in expected.items():
        torch.testing.assert_close(trained[name], value, rtol=1e-5, atol=1e-6)


def graphs_of_steps(cluster):
    """Return how many graphs a rank compiles in four steps."""
    begin()
    strategy = XLAStrategy(reduce_on_host=True)
    before = counts()["compiled"]
    fit(strategy, data=loader(8), devices=2, plugins=[cluster])
    return counts()["compiled"] - before


def test_gradients_that_are_averaged_on_the_host_are_fetched_together():
    assert max(in_ranks(graphs_of_steps)) < 6  # of 16 parameters
