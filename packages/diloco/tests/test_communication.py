"""Bytes that ranks send to other groups: an H-th of ddp's, and fewer in 16 and 8 bits."""

import pytest
import torch
from tests.hand_loop import Net, parts, start, train
from tests.ranks import each, in_ranks
from torch import nn

from dstrat.parallel.internals import RecordedCollectives
from dstrat_ddp import DDPStrategy
from dstrat_diloco import DiLoCoStrategy
from dstrat_diloco.average import GroupAverage

EVERY, STEPS = 10, 20


class Wide(Net):
    def make_layers(self):
        self.layers = nn.Sequential(nn.Linear(6, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 3))


def sent_in_training(cluster, cls=DiLoCoStrategy, **options):
    """The bytes of tensors that a rank sends, by the number of ranks of the group; and the mean of the last losses."""
    strategy = cls(**options)
    start(strategy, Wide(), parts(cluster))
    with RecordedCollectives() as recorded:
        losses = train(strategy, steps=STEPS)
    strategy.teardown()
    tensors = [one for one in recorded.collectives if one.bytes > 128]  # without losses, counters and digests
    by_size = {size: sum(one.sent for one in tensors if one.ranks == size) for size in (1, 2, 4)}
    return by_size, sum(losses[-5:]) / 5


CASES = {
    "ddp": {"cls": DDPStrategy},
    None: {"every": EVERY},
    "bfloat16": {"every": EVERY, "delta_dtype": "bfloat16"},
    "int8": {"every": EVERY, "delta_dtype": "int8"},
    "int8, fragments": {"every": EVERY, "delta_dtype": "int8", "fragments": 5, "delay": 2},
}


def test_groups_send_an_hth_of_ddp_and_half_or_a_quarter_of_it():
    first, other = in_ranks(each, function=sent_in_training, cases=CASES)
    ddp, _ = first["ddp"]
    shares = {name: by_size[2] / ddp[2] * EVERY for name, (by_size, _) in first.items() if name != "ddp"}
    print(shares)
    assert shares[None] == 1.0
    assert shares["bfloat16"] == pytest.approx(0.5, rel=1e-3)
    assert shares["int8"] == pytest.approx(0.25, rel=0.05)  # with scales, and the rest of a block
    assert shares["int8, fragments"] == pytest.approx(0.25, rel=0.1)
    assert {name: by_size for name, (by_size, _) in other.items()} == {name: by for name, (by, _) in first.items()}
    for name, (_, loss) in first.items():
        if name is not None:  # rounding does not change what is learned
            assert loss < 1.3 * first[None][1], name


def test_ranks_of_a_group_divide_what_goes_to_other_groups():
    cases = {inner: {"inner": inner, "groups": 2, "every": EVERY} for inner in ("ddp", "fsdp")}
    cases["alone"] = {"inner": "ddp", "groups": 4, "every": EVERY}
    for results in in_ranks(each, 4, function=sent_between_groups, cases=cases):
        alone = results["alone"]
        assert results["ddp"] == pytest.approx(alone / 2, rel=0.01)
        assert results["fsdp"] == pytest.approx(alone / 2, rel=0.01)


def sent_between_groups(cluster, **options):
    """The bytes that a rank gives to all-reductions among peers."""
    strategy = DiLoCoStrategy(**options)
    start(strategy, Wide(), parts(cluster))
    train(strategy, steps=EVERY - 1)
    with RecordedCollectives() as recorded:
        strategy._outer[0][1].after_step()
    strategy.teardown()
    return sum(one.bytes for one in recorded.collectives if one.kind == "all_reduce")


# Means


def means(cluster, numels, dtype, is_shared):
    strategy = DiLoCoStrategy(groups=2)
    start(strategy, Net(), parts(cluster))
    groups, results = strategy.groups, []
    for numel in numels:
        generator = torch.Generator().manual_seed(groups.index)
        tensor = torch.randn(numel, generator=generator) * 10 ** torch.linspace(-3, 3, numel)
        mean = GroupAverage(tensor.clone(), groups, is_shared=is_shared, dtype=dtype).wait()
        results.append((tensor, mean, bool((strategy.all_gather(mean) == mean).all())))
    strategy.teardown()
    return results


@pytest.mark.parametrize(("dtype", "largest"), [(None, 1e-6), ("bfloat16", 2**-8), ("int8", None)])
@pytest.mark.parametrize("world_size", [2, 4])
def test_means_are_the_same_on_all_ranks_and_as_exact_as_their_dtype(dtype, largest, world_size):
    numels = (0, 1, 7, 1024, 5001)
    results = in_ranks(means, world_size, numels=numels, dtype=dtype, is_shared=world_size == 4)
    for index in range(len(numels)):
        first, last = results[0][index], results[-1][index]
        expected = (first[0] + last[0]) / 2
        assert first[2]
        assert last[2]
        for block in range(0, numels[index], 1024):
            part = slice(block, block + 1024)
            error = (first[1] - expected)[part].abs()
            if largest is None:  # two roundings of half a step of the largest value of a block
                step = max(first[0][part].abs().max(), last[0][part].abs().max()) / 127
                assert float(error.max()) <= 1.01 * step
            else:
                size = first[0][part].abs() + last[0][part].abs()
                assert bool((error <= 2 * largest * size + 1e-12).all())


def not_finite(cluster):
    strategy = DiLoCoStrategy(groups=2)
    start(strategy, Net(), parts(cluster))
    tensor = torch.zeros(3000)
    tensor[5 + 1500 * strategy.groups.index] = float("inf") if strategy.groups.index else float("nan")
    mean = GroupAverage(tensor, strategy.groups, is_shared=False, dtype="int8").wait()
    strategy.teardown()
    return mean


def test_values_that_are_not_finite_stay_visible_in_8_bits():
    for mean in in_ranks(not_finite):
        assert not mean[:1024].isfinite().any()
        assert not mean[1505].isfinite()
        assert bool((mean[2048:] == 0).all())
