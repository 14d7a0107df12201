"""Losses and weights are those of a DiLoCo that is written by hand."""

import pytest
import torch
from packages.diloco.tests.hand_written import hand_written
from tests.hand_loop import BlockNet, Net, parts, single_device_losses, start, train
from tests.ranks import each, in_ranks

from dstrat_diloco import DiLoCoStrategy

EVERY, STEPS = 5, 17  # three rounds and a part

CASES = {
    "plain": {},
    "post-local SGD": {"outer_lr": 1.0, "outer_momentum": 0.0},
    "clipped": {"clip": 0.1},
    "two fragments": {"fragments": 2},
    "delayed": {"delay": 3},
    "delayed without mixing": {"delay": 2, "mixing": 0.0},
    "two fragments, delayed": {"fragments": 2, "delay": 4},
}
FRAGMENTS = {  # of about half of the elements
    "Net": [["layers.0.weight", "layers.0.bias"]],
    "BlockNet": [
        ["first.weight", "first.bias", *(f"blocks.0.{name}" for name in ("norm.weight", "norm.bias", "up.weight"))]
        + [f"blocks.0.{name}" for name in ("up.bias", "down.weight", "down.bias")]
        + [f"blocks.1.{name}" for name in ("norm.weight", "norm.bias", "up.weight")]
    ],
}
NETS = {"Net": Net, "BlockNet": BlockNet}


def trained(cluster, net, inner, groups, precision, clip=None, **options):
    strategy = DiLoCoStrategy(inner=inner, groups=groups, every=EVERY, **options)
    start(strategy, NETS[net](), parts(cluster, precision=precision))
    losses = train(strategy, steps=STEPS, clip=clip)
    state = strategy.module_state_dict()
    strategy.teardown()
    return losses, {name: value.clone() for name, value in state.items()}


@pytest.mark.parametrize(
    ("net", "inner", "ranks", "precision"),
    [
        ("Net", "ddp", 1, "32-true"),
        ("Net", "single_device", 1, "32-true"),
        ("Net", "ddp", 2, "32-true"),
        # Adam enlarges the rounding of small gradients in these layers, also without groups.
        ("BlockNet", "fsdp", 2, "64-true"),
        pytest.param("BlockNet", "fsdp(sharding_strategy='SHARD_GRAD_OP')", 2, "64-true", marks=pytest.mark.variant),
    ],
)
def test_losses_are_those_of_a_loop_written_by_hand(net, inner, ranks, precision):
    common = {"net": net, "inner": inner, "groups": 2, "precision": precision}
    cases = {name: common | options for name, options in CASES.items()}
    module = NETS[net]() if precision == "32-true" else NETS[net]().double()
    results = in_ranks(each, 2 * ranks, function=trained, cases=cases)
    for name, options in CASES.items():
        if "fragments" in options:
            first = FRAGMENTS[net]
            rest = [one for one, _ in NETS[net]().named_parameters() if one not in first[0]]
            options = {**options, "fragments": [*first, rest]}  # noqa: PLW2901 - their names, by hand
        losses, weights = hand_written(module, groups=2, ranks=ranks, every=EVERY, steps=STEPS, **options)
        for result in results:
            assert result[name][0] == pytest.approx(losses, rel=1e-6 if precision == "32-true" else 1e-12), name
        state = results[0][name][1]
        for parameter, value in weights.items():
            torch.testing.assert_close(state[parameter], value, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize(
    "inner", ["mesh", pytest.param("model_parallel(tensor_parallel_size=1)", marks=pytest.mark.variant)]
)
def test_other_strategies_that_shard_train_groups_too(inner):
    cases = {inner: {"net": "BlockNet", "inner": inner, "groups": 2, "precision": "64-true"}}
    [result, *_] = in_ranks(each, 4, function=trained, cases=cases)
    losses, _ = hand_written(BlockNet().double(), groups=2, ranks=2, every=EVERY, steps=STEPS)
    assert result[inner][0] == pytest.approx(losses, rel=1e-12)


class Plain(Net):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.learning_rate)


NETS["Plain"] = Plain


def test_each_step_a_mean_of_weights_is_one_device_with_sgd():
    strategy = {"every": 1, "outer_lr": 1.0, "outer_momentum": 0.0}

    [losses, *_] = in_ranks(every_step, 2, options=strategy)
    assert losses == pytest.approx(single_device_losses(Plain()), rel=1e-6)


def every_step(cluster, options):
    strategy = DiLoCoStrategy(**options)
    start(strategy, Plain(), parts(cluster))
    losses = train(strategy)
    strategy.teardown()
    return losses
