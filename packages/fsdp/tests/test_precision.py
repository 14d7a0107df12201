"""The dtypes in which parameters are kept, gathered and reduced."""

import dataclasses

import pytest
import torch
from tests.hand_loop import BlockNet, batches, one_pass, parts, share, start, train
from tests.ranks import each, in_ranks
from torch.distributed.fsdp import MixedPrecision as EarlierPolicy
from torch.distributed.fsdp import MixedPrecisionPolicy

from dstrat.builtin.precision.mixed import MixedPrecision
from dstrat.builtin.precision.true import TruePrecision
from dstrat.builtin.single_device import SingleDeviceStrategy
from dstrat.errors import ConflictError, RequestError
from dstrat_fsdp import FSDPStrategy
from dstrat_fsdp.options import input_dtype, precision_policy

STEPS = 6


def precise(flag):
    """The precision, with a loss scale at which nothing overflows."""
    if flag == "16-mixed":
        return MixedPrecision(flag, scaler=torch.amp.GradScaler("cpu", init_scale=256.0))
    return TruePrecision(flag) if flag.endswith("true") else MixedPrecision(flag)


def given(cluster, flag):
    return dataclasses.replace(parts(cluster), precision_plugin=precise(flag))


def trained(cluster, precision):
    strategy = FSDPStrategy()
    start(strategy, BlockNet(), given(cluster, precision))
    seen = []
    strategy.module.blocks[0].up.register_forward_pre_hook(lambda layer, _: seen.append(layer.weight.dtype))
    losses = train(strategy, steps=STEPS, clip=0.5)
    [optimizer] = strategy.optimizers
    kept = {str(parameter.dtype) for group in optimizer.param_groups for parameter in group["params"]}
    strategy.teardown()
    return losses, {str(dtype) for dtype in seen}, kept


PRECISIONS = {  # the dtype of parameters, and of computation, and how near losses are
    "bf16-true": ("torch.bfloat16", "torch.bfloat16", 0.1),
    "bf16-mixed": ("torch.float32", "torch.bfloat16", 0.05),
    "16-mixed": ("torch.float32", "torch.float16", 0.02),
    "64-true": ("torch.float64", "torch.float64", 1e-12),
}


def test_losses_are_near_those_of_one_device_and_parameters_are_gathered_in_the_dtype_of_computation():
    expected = {}
    for precision in PRECISIONS:
        alone = SingleDeviceStrategy()
        start(alone, BlockNet(), given(None, precision))
        expected[precision] = train(alone, steps=STEPS, clip=0.5)
    for found in in_ranks(each, function=trained, cases={name: {"precision": name} for name in PRECISIONS}):
        for precision, (losses, gathered, kept_in) in found.items():
            kept, computed, tolerance = PRECISIONS[precision]
            assert losses == pytest.approx(expected[precision], rel=tolerance)
            assert losses[-1] < losses[0]
            assert gathered == {computed}
            assert kept_in == {kept}


class FrozenAtFirst(BlockNet):
    """All layers of a block are frozen, and all layers outside of blocks."""

    def make_layers(self):
        super().make_layers()
        for layer in (self.first, self.blocks[0], self.last):
            layer.requires_grad_(False)


def losses_of_unfrozen(cluster, flag, precedes=False):
    """Train with frozen layers and then all, also after a forward pass in which none is frozen."""
    strategy = SingleDeviceStrategy() if cluster is None else FSDPStrategy()
    start(strategy, FrozenAtFirst(), given(cluster, flag))
    frozen = [parameter for parameter in strategy.module.parameters() if not parameter.requires_grad]
    if precedes:
        strategy.module.requires_grad_(True)
        strategy.validation_step(share(strategy, next(batches(1))), 0)
        for parameter in frozen:
            parameter.requires_grad_(False)
    losses = train(strategy, steps=2, clip=0.5)
    strategy.module.requires_grad_(True)
    losses += train(strategy, steps=STEPS, clip=0.5)
    gradients = {str(parameter.grad.dtype) for parameter in strategy.module.parameters()}
    strategy.teardown()
    return losses, gradients


def test_layers_that_are_unfrozen_later_have_the_gradients_of_layers_that_never_were_frozen():
    flags = ("bf16-mixed", "16-mixed")
    cases = {(flag, precedes): {"flag": flag, "precedes": precedes} for flag in flags for precedes in (False, True)}
    for results in in_ranks(each, function=losses_of_unfrozen, cases=cases):
        for flag in flags:
            assert results[flag, False] == results[flag, True]
            losses, gradients = results[flag, False]
            assert losses == pytest.approx(losses_of_unfrozen(None, flag)[0], rel=PRECISIONS[flag][2])
            assert gradients == {"torch.float32"}


class Overflowing(BlockNet):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss + 1e9 * self.last.bias[0] if batch_idx == 1 else loss  # rank 0 has this value's gradient


class OverflowingWithScalar(Overflowing):
    """Its first gradient is that of a scalar, which all ranks have."""

    def make_layers(self):
        super().make_layers()
        self.scale = torch.nn.Parameter(torch.ones(()))

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + 0.1 * self.scale**2


def weights_after_an_overflow(cluster, module):
    strategy = FSDPStrategy()
    start(strategy, module(), given(cluster, "16-mixed"))
    found = []
    [optimizer] = strategy.optimizers
    for index, batch in enumerate(batches(3)):
        optimizer.zero_grad()
        strategy.optimizer_step(optimizer, lambda i=index, b=batch: one_pass(strategy, b, i, 1), strategy.model)
        found.append(float(strategy.module.first.bias.detach().full_tensor().double().sum()))
    strategy.teardown()
    return found


def test_a_step_that_overflows_in_the_shard_of_one_rank_is_skipped_on_all():
    cases = {module: {"module": module} for module in (Overflowing, OverflowingWithScalar)}
    found, of_second = in_ranks(each, function=weights_after_an_overflow, cases=cases)
    assert found == of_second
    for weights in found.values():
        assert weights[0] == weights[1] != weights[2]


def test_the_policy_follows_from_the_precision():
    assert precision_policy(None, TruePrecision()) == MixedPrecisionPolicy()
    assert precision_policy(None, TruePrecision("bf16-true")) == MixedPrecisionPolicy()
    mixed = precision_policy(None, MixedPrecision("bf16-mixed"))
    assert (mixed.param_dtype, mixed.reduce_dtype) == (torch.bfloat16, torch.float32)


class Table(BlockNet):
    """With a table that is added outside of the blocks."""

    def make_layers(self):
        super().make_layers()
        self.register_buffer("table", torch.linspace(0, 1, 10))
        self.dtypes = set()

    def layers(self, x):
        x = self.first(x) + self.table
        self.dtypes |= {self.first.weight.dtype, self.table.dtype, x.dtype}
        for block in self.blocks:
            x = block(x)
        return self.last(x)


EARLIER = EarlierPolicy(torch.bfloat16, torch.float32, torch.bfloat16)
POLICIES = {
    "earlier": (EARLIER, Table),
    "policy": (MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32), BlockNet),
    "output in float32": (
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32),
        BlockNet,
    ),
}


def trained_by_policy(cluster, policy):
    mixed_precision, net = POLICIES[policy]
    strategy = FSDPStrategy(mixed_precision=mixed_precision)
    module = net()
    start(strategy, module, parts(cluster))
    losses = train(strategy, steps=STEPS)
    kept = {str(value.dtype) for value in strategy.sharded_module_state().values()}
    evaluated = strategy.validation_step(share(strategy, next(batches(1))), 0)
    strategy.teardown()
    after = {str(value.dtype) for value in [*module.parameters(), *module.buffers()]}
    return losses, sorted(map(str, getattr(module, "dtypes", []))), str(evaluated.dtype), kept | after


def test_a_policy_casts_what_layers_outside_of_the_blocks_get_without_a_precision():
    expected = {}
    for name, (_, net) in POLICIES.items():
        alone = SingleDeviceStrategy()
        start(alone, net(), parts(None))
        expected[name] = train(alone, steps=STEPS)
    for found in in_ranks(each, function=trained_by_policy, cases={name: {"policy": name} for name in POLICIES}):
        for name, (losses, dtypes, evaluated, kept) in found.items():
            assert losses == pytest.approx(expected[name], rel=0.05)
            assert dtypes == (["torch.bfloat16"] if name == "earlier" else [])
            assert evaluated == ("torch.float32" if name == "output in float32" else "torch.bfloat16")
            assert kept == {"torch.float32"}


class Normalized(BlockNet):
    """With a layer that keeps running statistics, in a block and outside of them."""

    def make_layers(self):
        super().make_layers()
        self.norm = torch.nn.BatchNorm1d(10)
        self.blocks[0].norm = torch.nn.BatchNorm1d(10)
        self.dtypes = set()

    def layers(self, x):
        x = self.norm(self.first(x))
        for block in self.blocks:
            x = block(x)
        self.dtypes |= {self.norm.weight.dtype, self.norm.running_mean.dtype, self.last.weight.dtype}
        return self.last(x)


LOW = torch.bfloat16
WITH_STATISTICS = {
    "precision": {"flag": "bf16-mixed"},
    "earlier": {"policy": EarlierPolicy(LOW)},
    "earlier with buffers": {"policy": EarlierPolicy(LOW, buffer_dtype=LOW)},
    "policy": {"policy": MixedPrecisionPolicy(LOW)},
}


def trained_with_statistics(cluster, flag="32-true", policy=None):
    strategy, module = FSDPStrategy(mixed_precision=policy), Normalized()
    start(strategy, module, given(cluster, flag))
    losses = train(strategy, steps=STEPS)
    strategy.teardown()
    return losses, sorted(map(str, module.dtypes)), str(module.norm.running_mean.dtype)


@pytest.mark.parametrize("world_size", [1, 2])
def test_layers_with_running_statistics_stay_in_float32(world_size):
    alone = SingleDeviceStrategy()
    start(alone, Normalized(), given(None, "bf16-mixed"))
    expected = train(alone, steps=STEPS)
    for found in in_ranks(each, world_size, function=trained_with_statistics, cases=WITH_STATISTICS):
        for losses, dtypes, after in found.values():
            assert dtypes == ["torch.bfloat16", "torch.float32"]
            assert after == "torch.float32"
            # Each of two ranks normalizes by its half of a batch.
            assert losses == pytest.approx(expected, rel=0.05 if world_size == 1 else 0.5)


def test_only_a_policy_that_computes_without_autocast_casts_batches():
    assert input_dtype(None, TruePrecision("bf16-true")) is None
    assert input_dtype(EARLIER, TruePrecision()) is torch.bfloat16
    assert input_dtype(EARLIER, MixedPrecision("bf16-mixed")) is None
    assert input_dtype(EarlierPolicy(torch.bfloat16, cast_root_forward_inputs=False), TruePrecision()) is None
    assert input_dtype(MixedPrecisionPolicy(torch.bfloat16, cast_forward_inputs=False), TruePrecision()) is None


def test_a_policy_of_ones_own_is_taken_in_either_spelling():
    own = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    assert precision_policy(own, TruePrecision()) is own
    earlier = EarlierPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, cast_forward_inputs=True)
    assert precision_policy(earlier, MixedPrecision("bf16-mixed")) == own


def test_a_policy_that_contradicts_the_precision_is_refused():
    own = MixedPrecisionPolicy(param_dtype=torch.float16)
    with pytest.raises(ConflictError, match="'bf16-mixed' computes in torch"):
        precision_policy(own, MixedPrecision("bf16-mixed"))
    with pytest.raises(ConflictError, match="precision='16-mixed' as well"):
        precision_policy(own, TruePrecision())
    with pytest.raises(RequestError, match="keep_low_precision_grads=True"):
        precision_policy(EarlierPolicy(torch.bfloat16, keep_low_precision_grads=True), TruePrecision())
    with pytest.raises(RequestError, match="is not a MixedPrecisionPolicy"):
        precision_policy("bf16", TruePrecision())
