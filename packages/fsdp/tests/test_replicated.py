"""Scalars, which torch cannot shard, and all parameters of one rank train, save and move as all others."""

from functools import partial

import pytest
import torch
from tests.hand_loop import BlockNet, Run, parts, single_device_losses, start, train
from tests.ranks import each, in_ranks
from tests.trainer_runs import Saves, loader, quiet_trainer, same_when_resumed
from tests.ways_of_training import WAYS, losses_of_one_device
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from dstrat import TrainModule
from dstrat.builtin.single_device import SingleDeviceStrategy
from dstrat.checkpoint.portable.checkpoint_io import PortableCheckpointIO
from dstrat.checkpoint.torch_file import TorchCheckpointIO
from dstrat.errors import MisuseError
from dstrat.parallel.shards import local_tensor
from dstrat_fsdp import FSDPStrategy

SHORT = {"steps": 6}


class Gated(nn.Module):
    """A layer with a scalar of its own, and one that several layers share."""

    def __init__(self, gate, width=10):
        super().__init__()
        self.gate, self.bias = gate, nn.Parameter(torch.tensor(0.1))
        self.layer = nn.Linear(width, width)

    def forward(self, x):
        return x + self.gate * torch.tanh(self.layer(x) + self.bias)

    def reset_parameters(self):
        with torch.no_grad():
            self.gate.fill_(0.5)
            self.bias.fill_(0.1)


class ScaledNet(BlockNet):
    """Has scalars in its blocks, one of its own that a step uses, and one that nothing uses."""

    def make_layers(self):
        gate = nn.Parameter(torch.tensor(0.5))
        self.first = nn.Linear(6, 10)
        self.blocks = nn.ModuleList(Gated(gate) for _ in range(3))
        for block in self.blocks:
            block.gate = self.blocks[0].gate  # a context may have made it on the meta device
        self.last = nn.Linear(10, 3)
        self.log_scale = nn.Parameter(torch.tensor(0.3))
        self.unused = nn.Parameter(torch.tensor(2.0))

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        return nn.functional.mse_loss(self.log_scale.exp() * self.layers(inputs), targets)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.1)

    def reset_parameters(self):
        with torch.no_grad():
            self.log_scale.fill_(0.3)
            self.unused.fill_(2.0)


class Foreach(ScaledNet):
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.1, foreach=True)


class Fused(ScaledNet):
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.1, fused=True)


def losses_and_scalars(cluster, options=None, training=None, module="ScaledNet", precision="32-true"):
    strategy = FSDPStrategy(**(options or {}))
    start(strategy, globals()[module](), parts(cluster, precision))
    losses = train(strategy, **(SHORT if training is None else training))
    strategy.teardown()
    found = strategy.module
    return losses, [local_tensor(p.detach()).item() for p in (found.log_scale, found.unused)]


@pytest.fixture(scope="module")
def expected():
    """Losses of one device for each way of training."""
    return losses_of_one_device(ScaledNet)


@pytest.mark.parametrize("ranks", [1, 2])
def test_losses_with_scalars_are_those_of_one_device(expected, ranks):
    cases = {way: {"training": training} for way, training in WAYS.items()}
    for found in in_ranks(each, ranks, function=losses_and_scalars, cases=cases):
        assert {way: losses for way, (losses, _) in found.items()} == expected
        assert {unused for _, (_, unused) in found.values()} == {2.0}  # no gradient, so no weight decay


OPTIONS = {
    "replicas": {"options": {"device_mesh": (2, 1)}},
    "offloading": {"options": {"cpu_offload": True}},
    "gathered at the end": {"options": {"state_dict_type": "full"}},
    "blocks that are kept": {"options": {"reshard_after_forward": False}},
    "small blocks": {"options": {"auto_wrap_policy": 1}},
    "activations computed again": {"options": {"activation_checkpointing": Gated}},
    "foreach": {"module": "Foreach"},
    "fused": {"module": "Fused"},
}


@pytest.mark.slow
def test_options_leave_the_losses_with_scalars_as_they_are():
    training = {**SHORT, "accumulate": 2, "clip": 0.05}
    expected = pytest.approx(single_device_losses(ScaledNet(), **training), rel=1e-6, abs=0)
    cases = {name: {**case, "training": training} for name, case in OPTIONS.items()}
    for found in in_ranks(each, function=losses_and_scalars, cases=cases):
        assert {name: losses for name, (losses, _) in found.items()} == dict.fromkeys(OPTIONS, expected)


class Quantized(ScaledNet):
    """Has frozen parameters of integers."""

    def make_layers(self):
        super().make_layers()
        self.zero_point = nn.Parameter(torch.tensor(3, dtype=torch.int8), requires_grad=False)
        self.codes = nn.Parameter(torch.arange(6, dtype=torch.int8), requires_grad=False)

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        return super().training_step((inputs + 0.1 * (self.codes - self.zero_point), targets), batch_idx)

    def reset_parameters(self):
        super().reset_parameters()
        with torch.no_grad():
            self.zero_point.fill_(3)
            self.codes.copy_(torch.arange(6))


@pytest.mark.parametrize("ranks", [1, 2])
def test_frozen_parameters_may_be_integers(ranks):
    expected = pytest.approx(single_device_losses(Quantized(), **SHORT), rel=1e-6, abs=0)
    for losses, _ in in_ranks(losses_and_scalars, ranks, module="Quantized"):
        assert losses == expected


class Clamped(ScaledNet):
    """Limits a scalar in the step, as CLIP does."""

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            self.log_scale.clamp_(max=0.2)
        return super().training_step(batch, batch_idx)


class ClampedData(ScaledNet):
    """Replaces the data of scalars in the step, also of one in a layer."""

    def training_step(self, batch, batch_idx):
        for scalar in (self.log_scale, self.blocks[0].bias):
            scalar.data = scalar.data.clamp(max=0.05)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("module", [Clamped, ClampedData])
def test_a_scalar_may_be_changed_in_a_step(module):
    expected = single_device_losses(module(), **SHORT)
    for losses, _ in in_ranks(losses_and_scalars, module=module.__name__):
        assert losses == pytest.approx(expected, rel=1e-6)


class Replaced(ScaledNet):
    def training_step(self, batch, batch_idx):
        self.log_scale = nn.Parameter(torch.tensor(0.2))
        return super().training_step(batch, batch_idx)


def error_of_replaced(cluster):
    strategy = FSDPStrategy()
    start(strategy, Replaced(), parts(cluster))
    try:
        train(strategy, steps=2)
    except MisuseError as error:
        return str(error)
    finally:
        strategy.teardown()
    return None


def test_a_scalar_that_a_step_replaces_is_an_error_as_for_other_parameters():
    for message in in_ranks(error_of_replaced):
        assert str(message).startswith("parameter 'log_scale' was replaced after the module was sharded")


def trained_from_meta(cluster):
    strategy = FSDPStrategy()
    strategy.receive(parts(cluster))
    strategy.setup_environment()
    with strategy.model_sharded_context():
        module = ScaledNet()
    strategy.connect(module)
    strategy.setup(Run(module))
    losses = train(strategy, **SHORT)
    strategy.teardown()
    return losses


def test_scalars_may_be_made_without_memory():
    expected = single_device_losses(ScaledNet(), **SHORT)
    assert in_ranks(trained_from_meta) == [pytest.approx(expected, rel=1e-6)] * 2


def two_runs(cluster, state_dict_type):
    module = ScaledNet()
    losses = []
    for _ in range(2):
        strategy = FSDPStrategy(state_dict_type=state_dict_type)
        start(strategy, module, parts(cluster))
        losses += train(strategy, **SHORT)
        strategy.teardown()
    return losses


def test_another_run_continues_with_the_scalars_of_the_first():
    alone, expected = ScaledNet(), []
    for _ in range(2):
        strategy = SingleDeviceStrategy()
        start(strategy, alone, parts())
        expected += train(strategy, **SHORT)
    cases = {kind: {"state_dict_type": kind} for kind in ("sharded", "full")}
    for found in in_ranks(each, function=two_runs, cases=cases):
        assert found == dict.fromkeys(cases, pytest.approx(expected, rel=1e-6))


def passed_by(cluster):
    strategy = FSDPStrategy()
    start(strategy, ScaledNet(), parts(cluster))
    try:
        for index in range(2):
            strategy.training_step((torch.ones(1, 6), torch.ones(1, 3)), index).backward()
    except MisuseError as error:
        return str(error)
    finally:
        strategy.teardown()
    return None


def test_a_backward_pass_that_leaves_scalars_as_those_of_one_rank_is_refused():
    for message in in_ranks(passed_by):
        assert message.startswith("a backward pass left the gradients of scalar parameters as those of one rank: call")


class Alone(BlockNet):
    """Its steps call ``backward`` themselves."""

    automatic_optimization = False


def units_and_gradients(cluster, module, **options):
    strategy, net = FSDPStrategy(**options), module()
    start(strategy, net, parts(cluster))
    memory = [local_tensor(parameter).data_ptr() for parameter in net.parameters()]
    loss = strategy.training_step(strategy.batch_to_device((torch.ones(4, 6), torch.ones(4, 3))), 0)
    in_step = [parameter.data_ptr() for parameter in net.parameters()]
    loss.backward()
    strategy.local_weights()  # which leaves the step
    gradients = [parameter.grad is not None for parameter in net.parameters()]
    outside = net.blocks[0](torch.ones(1, 10, device=strategy.root_device)).requires_grad
    strategy.teardown()
    return any(isinstance(layer, FSDPModule) for layer in net.modules()), memory == in_step, all(gradients), outside


@pytest.mark.parametrize("module", [BlockNet, Alone])
def test_parameters_of_one_rank_are_not_copied_for_steps(module):
    [(has_units, is_same_memory, *results)] = in_ranks(units_and_gradients, 1, module=module)
    assert not has_units
    assert is_same_memory
    assert all(results)


def kinds(cluster, options):
    strategy = FSDPStrategy(**options)
    start(strategy, BlockNet(), parts(cluster))
    has_units = any(isinstance(layer, FSDPModule) for layer in strategy.module.modules())
    strategy.teardown()
    return has_units


def test_dtypes_and_offloading_gather_the_parameters_of_one_rank():
    dtypes = {"mixed_precision": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}
    cases = {name: {"options": options} for name, options in (("dtypes", dtypes), ("host", {"cpu_offload": True}))}
    assert in_ranks(each, 1, function=kinds, cases=cases) == [{"dtypes": True, "host": True}]


# Trainer and checkpoints


class Scaled(TrainModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = ScaledNet()

    def training_step(self, batch, batch_idx):
        return self.net.training_step(batch, batch_idx)

    def configure_optimizers(self):
        return self.net.configure_optimizers()


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor(0.3))

    def forward(self, x):
        return self.log_scale.exp() * x


class ScaledByHand(TrainModule):
    """Uses scalars before and after an optimizer's step; some gradients are reduced, others not."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        gate = nn.Parameter(torch.tensor(0.5))
        self.net = nn.Sequential(nn.Linear(6, 10), Gated(gate), Gated(gate), nn.Linear(10, 3), Scale())

    def training_step(self, batch, batch_idx):
        for begins_step in (True, False):
            if begins_step:
                self.optimizers().step()
                self.optimizers().zero_grad()
            loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
            if begins_step:
                self.manual_backward(loss)
            else:
                with self.trainer.strategy.no_backward_sync():
                    self.manual_backward(loss)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


SAMPLES, BATCH = 48, 8


def fit(cluster, strategy, module, *, io=PortableCheckpointIO, ckpt_path=None, **options):
    trainer = quiet_trainer(strategy, cluster, plugins=[io()], **options)
    trainer.fit(module, loader(SAMPLES, BATCH // trainer.world_size), ckpt_path=ckpt_path)
    return {name: local_tensor(value.detach()).clone() for name, value in module.named_parameters()}


class Adversarial(TrainModule):
    """Computes scores before the gradients of the layers that give them are turned off."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        self.generator = nn.Linear(6, 6)
        self.judge = nn.Sequential(nn.Linear(6, 3), Scale())

    def training_step(self, batch, batch_idx):
        generating, judging = self.optimizers()
        score = self.judge(self.generator(batch[0])).square().mean()
        with self.toggled_optimizer(generating):
            generating.zero_grad()
            self.manual_backward(score)
            generating.step()
        judging.zero_grad()
        self.manual_backward(nn.functional.mse_loss(self.judge(batch[0]), batch[1]))
        judging.step()

    def configure_optimizers(self):
        return [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (self.generator, self.judge)]


def weights_after(cluster, module):
    trained = fit(cluster, FSDPStrategy(state_dict_type="full"), globals()[module]())
    return {name: value.tolist() for name, value in trained.items()}


def assert_trains_as_on_one_device(module, ranks):
    expected = fit(None, "auto", module())
    for found in in_ranks(weights_after, ranks, module=module.__name__):
        for name, value in expected.items():
            torch.testing.assert_close(torch.tensor(found[name]), value, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("ranks", [1, 2])
def test_gradients_that_are_turned_off_before_the_backward_pass_go_to_no_optimizer(ranks):
    assert_trains_as_on_one_device(Adversarial, ranks)


class Lending(nn.Module):
    """Uses scalars of layers that it does not call."""

    def __init__(self):
        super().__init__()
        self.layer, self.scale = nn.Linear(6, 3), Scale()
        self.shifts = nn.ParameterList([nn.Parameter(torch.tensor(0.2))])

    def forward(self, x):
        return self.scale.log_scale.exp() * self.layer(x) + self.shifts[0]


class TwicePerStep(TrainModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        self.net = Lending()

    def training_step(self, batch, batch_idx):
        for _ in range(2):
            self.optimizers().zero_grad()
            self.manual_backward(nn.functional.mse_loss(self.net(batch[0]), batch[1]))
            self.optimizers().step()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_layer_may_use_scalars_of_layers_that_it_does_not_call_again_after_a_backward_pass(ranks):
    assert_trains_as_on_one_device(TwicePerStep, ranks)


GROUPS = {"accumulate_grad_batches": 4, "gradient_clip_val": 1.0}
CASES = {
    "portable": {"module": "Scaled", "io": PortableCheckpointIO, **GROUPS},
    "one file": {"module": "Scaled", "io": TorchCheckpointIO, **GROUPS},
    "by hand": {"module": "ScaledByHand", "io": PortableCheckpointIO},
}
MOVED = {name: case for name, case in CASES.items() if name != "by hand"}  # whose gradients are pending all the time


def resumed(cluster, folder, module, **options):
    def fit_anew(**more):
        strategy = FSDPStrategy(state_dict_type="full")
        return fit(cluster, strategy, globals()[module](), default_root_dir=folder, **options, **more)

    same = same_when_resumed(fit_anew, folder, (2, 4))
    moved = folder / "alone" / "4"
    return same, {name: value.tolist() for name, value in fit_anew(ckpt_path=moved if moved.exists() else None).items()}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_scalars_resume_exactly_and_move_from_and_to_one_device(tmp_path, ranks):
    alone = {
        name: partial(fit, None, "auto", **{**case, "module": globals()[case["module"]]()})
        for name, case in CASES.items()
    }
    expected = {
        name: fit_alone(callbacks=[Saves(tmp_path / name / "alone", (4,))] if name in MOVED else None)
        for name, fit_alone in alone.items()
    }
    cases = {name: {"folder": tmp_path / name, **case} for name, case in CASES.items()}
    for found in in_ranks(each, ranks, function=resumed, cases=cases):
        for name, (same, weights) in found.items():
            assert same == {2: True, 4: True}
            for key, value in weights.items():
                torch.testing.assert_close(torch.tensor(value), expected[name][key], rtol=1e-5, atol=1e-7)
    for name in MOVED:
        for key, value in alone[name](module=Scaled(), ckpt_path=tmp_path / name / "4").items():
            torch.testing.assert_close(value, expected[name][key], rtol=1e-5, atol=1e-7)
