"""Parameters that a step leaves without a gradient."""

import pytest
import torch
from tests.hand_loop import Net, batches, one_pass, parts, share, single_device_losses, start, train
from tests.ranks import each, in_ranks
from torch import nn

from dstrat.errors import MisuseError
from dstrat_ddp import DDPStrategy


class HalfUsed(Net):
    def __init__(self, unused=1):
        super().__init__()
        self.spare = nn.ModuleList(nn.Linear(2, 2) for _ in range(unused))


def explanation(cluster, unused=1):
    strategy = DDPStrategy()
    start(strategy, HalfUsed(unused), parts(cluster))
    [optimizer] = strategy.optimizers
    before = [parameter.detach().clone() for parameter in strategy.module.parameters()]
    with pytest.raises(MisuseError) as raised:
        strategy.optimizer_step(optimizer, lambda: one_pass(strategy, next(batches()), 0, 1), strategy.model)
    untouched = all(map(torch.equal, before, strategy.module.parameters()))
    strategy.on_exception(raised.value)
    strategy.teardown()
    return str(raised.value), type(raised.value.__cause__).__name__, untouched


def test_the_error_names_them_and_the_alias_before_anything_is_applied():
    for message, cause, untouched in in_ranks(explanation):
        assert message.startswith("the loss does not depend on spare.0.weight, spare.0.bias, and ddp waits for")
        assert 'strategy="ddp_find_unused_parameters_true"' in message
        assert "DDPStrategy(find_unused_parameters=True)" in message
        assert cause == "RuntimeError"
        assert untouched


def test_the_error_does_not_name_hundreds():
    [(message, _, _)] = in_ranks(explanation, 1, unused=100)
    assert "spare.4.bias and others, and ddp waits" in message


def losses_with(cluster, **options):
    strategy = DDPStrategy(**options)
    start(strategy, HalfUsed(), parts(cluster))
    losses = train(strategy)
    strategy.teardown()
    return losses


def test_they_are_found_on_request():
    cases = {option: {option: True} for option in ("find_unused_parameters", "static_graph")}
    expected = pytest.approx(single_device_losses(HalfUsed()), rel=1e-6)
    for losses in in_ranks(each, function=losses_with, cases=cases):
        assert losses == dict.fromkeys(cases, expected)


class Backwards(Net):
    """Calls backward by itself, outside the strategy."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss + 0 * self.unused.sum() if batch_idx == 0 else loss


def late_explanation(cluster):
    module = Backwards()
    module.unused = nn.Parameter(torch.zeros(2))
    strategy = DDPStrategy()
    start(strategy, module, parts(cluster))
    given = enumerate(batches())
    for index, batch in (next(given), next(given)):
        strategy.training_step(share(strategy, batch), index).backward()
    with pytest.raises(MisuseError) as raised:
        strategy.training_step(share(strategy, batch), 2)
    strategy.teardown()
    return str(raised.value)


def test_a_backward_pass_around_the_strategy_is_explained_at_the_next_step():
    for message in in_ranks(late_explanation):
        assert message.startswith("the loss does not depend on unused, and")


class Broken(Net):
    def training_step(self, batch, batch_idx):
        raise RuntimeError("of another kind")


def other_error(cluster):
    strategy = DDPStrategy()
    start(strategy, Broken(), parts(cluster))
    with pytest.raises(RuntimeError, match="of another kind") as raised:
        strategy.training_step(next(batches()), 0)
    strategy.teardown()
    return type(raised.value).__name__


def test_other_errors_are_left_as_they_are():
    assert in_ranks(other_error, 1) == ["RuntimeError"]
