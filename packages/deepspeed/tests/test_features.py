"""What a training can have besides a loss: gradients, groups, shared parameters, precisions, skipped steps."""

import logging
import math
import sys

import pytest
import torch
from deepspeed_loop import Net, Run, batches, losses_of, parts, share, single_device_losses, start, train
from torch import nn
from torch.utils.checkpoint import checkpoint

from dstrat.builtin.single_device import SingleDeviceStrategy
from dstrat.errors import MisuseError
from dstrat.parallel.meta_device import parameters_on_meta
from dstrat_deepspeed import DeepSpeedStrategy

STAGES = (0, 1, 2, 3)


class Shared(Net):
    """Tied, frozen and unused parameters, groups, and activations that are computed again."""

    def __init__(self):
        super().__init__()
        self.again = nn.Linear(3, 3)
        self.tied = nn.Linear(3, 3)
        self.tied.weight = self.again.weight
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.unused = nn.Linear(5, 5)

    def layers(self, x):
        x = checkpoint(super().layers, x, use_reentrant=False)
        return self.frozen(self.tied(torch.tanh(self.again(x))))

    def configure_optimizers(self):
        wide = [p for p in self.parameters() if p.ndim > 1 and p.requires_grad]
        rest = [p for p in self.parameters() if p.ndim <= 1 and p.requires_grad]
        return torch.optim.SGD([{"params": wide}, {"params": rest, "lr": 0.02}], lr=0.05, momentum=0.9)


class Decayed(Net):
    """Groups with and without decay, of which the first and the third are empty, and a scheduler for each group."""

    def configure_optimizers(self):
        groups = [
            {"params": []},
            {"params": [p for p in self.parameters() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [], "weight_decay": 0.5},
            {"params": [p for p in self.parameters() if p.ndim <= 1], "lr": 0.02},
        ]
        optimizer = torch.optim.AdamW(groups, lr=0.01)
        factors = [lambda step: 1.0, lambda step: 0.5**step, lambda step: 1.0, lambda step: 0.9**step]
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factors)
        return optimizer


def decayed(strategy, given):
    module = Decayed()
    start(strategy, module, given)
    [optimizer] = strategy.optimizers
    losses = []
    for _ in range(4):
        losses += train(strategy, steps=2)
        module.scheduler.step()
    rates = [group["lr"] for group in optimizer.param_groups]
    state = strategy.optimizer_state(optimizer)
    shard = strategy.sharded_optimizer_state(optimizer)
    strategy.load_sharded_optimizer_state(optimizer, shard)
    losses += train(strategy, steps=2)
    strategy.teardown()
    return losses, rates, [len(group["params"]) for group in state.get("param_groups", [])]


class Manual(Net):
    """Computes gradients of two halves of the batch itself, and steps in each second step."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        losses = []
        for half in (slice(None, None, 2), slice(1, None, 2)):
            loss = super().training_step(tuple(tensor[half] for tensor in batch), batch_idx)
            self.strategy.backward(loss / 4)
            losses.append(loss.detach() / 2)
        if batch_idx % 2:
            [optimizer] = self.strategy.optimizers
            self.strategy.clip_gradients(optimizer, 0.05)
            self.strategy.optimizer_step(optimizer, lambda: None)
            optimizer.zero_grad()
        return sum(losses)


def manual_losses(strategy, given):
    module = Manual()
    start(strategy, module, given)
    module.__dict__["strategy"] = strategy
    losses = []
    for index, batch in enumerate(batches(6)):
        losses.append(float(strategy.reduce(strategy.training_step(share(strategy, batch), index))))
    strategy.teardown()
    return losses


def plain(parameter):
    return not vars(parameter) and parameter.grad is None and parameter.numel() > 0


class Poisoned(Net):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * float("nan") if batch_idx == 1 else loss


def train_everything(cluster, stage):
    """Train in all ways, one after the other in one process."""
    programs = []
    sys.addaudithook(lambda event, arguments: programs.append(arguments[0]) if event == "subprocess.Popen" else None)
    found = {
        **structured(stage, parts(cluster)),
        "manual": manual_losses(DeepSpeedStrategy(stage=stage), parts(cluster)),
        "decayed": decayed(DeepSpeedStrategy(stage=stage), parts(cluster)),
        "gradients": gradients(stage, parts(cluster)),
        "poisoned": poisoned(stage, parts(cluster)),
        **{
            precision: losses_of(DeepSpeedStrategy(stage=stage), Net(), parts(cluster, precision))
            for precision in ("bf16-true", "bf16-mixed")
        },
    }
    return {**found, "programs": programs, "compiler": "torch._inductor.compile_fx" in sys.modules}


def structured(stage, given):
    linear = nn.functional.linear
    module = Shared()
    return {
        "shared": losses_of(DeepSpeedStrategy(stage=stage), module, given),
        "plain again": all(plain(parameter) for parameter in module.parameters()),
        "shapes": [tuple(parameter.shape) for parameter in module.parameters()],
        "tied": module.tied.weight is module.again.weight,
        "dicts": {type(part._parameters).__name__ for part in module.modules()},
        "own linear": nn.functional.linear is linear,
    }


def gradients(stage, given):
    net, strategy = Net(), DeepSpeedStrategy(stage=stage)
    start(strategy, net, given)
    optimizer = strategy.optimizers[0]
    first = next(batches())
    for _ in range(2):  # the first gradients are thrown away
        optimizer.zero_grad()
        strategy.backward(strategy.training_step(share(strategy, first), 0))
    gradient = strategy.full_grad(net.blocks[0].up.weight).clone()
    before = strategy.grad_norm()
    strategy.clip_gradients(optimizer, 0.01)
    strategy.optimizer_step(optimizer, lambda: None)
    after = strategy.grad_norm()
    strategy.teardown()
    return gradient, before, after


def poisoned(stage, given):
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    logging.getLogger("dstrat_deepspeed").addHandler(handler)
    strategy = DeepSpeedStrategy(stage=stage)
    start(strategy, Poisoned(), given)
    losses = train(strategy, steps=3)
    skipped = strategy.skipped_steps
    strategy.teardown()
    logging.getLogger("dstrat_deepspeed").removeHandler(handler)
    return losses[-1], skipped, [record.getMessage() for record in records if record.levelno >= logging.WARNING]


@pytest.fixture(scope="module", params=STAGES, ids="stage {}".format)
def found(request, ranks):
    """What each rank has found with a stage."""
    return request.param, ranks(train_everything, stage=request.param)


def test_losses_with_groups_shared_frozen_and_unused_parameters_are_those_of_one_device(found):
    for rank in found[1]:
        assert rank["shared"] == pytest.approx(single_device_losses(Shared()), rel=2e-6, abs=0)


def test_schedulers_of_empty_groups_are_those_of_one_device(found):
    alone = decayed(SingleDeviceStrategy(), parts(None))
    for number, rank in enumerate(found[1]):
        losses, rates, sizes = rank["decayed"]
        assert losses == pytest.approx(alone[0], rel=1e-5, abs=0)
        assert rates == alone[1]
        assert sizes == (alone[2] if number == 0 or found[0] == 0 else [])


def test_a_module_is_as_before_after_the_training(found):
    for rank in found[1]:
        assert rank["plain again"]
        assert rank["shapes"] == [tuple(parameter.shape) for parameter in Shared().parameters()]
        assert rank["tied"]
        assert rank["dicts"] == {"dict"}
        assert rank["own linear"]


def test_no_program_is_started_and_torchs_compiler_is_not_loaded_where_nothing_is_compiled(found):
    for rank in found[1]:
        assert not rank["programs"]
        assert not rank["compiler"]


def test_losses_with_manual_optimization_are_those_of_one_device(found):
    expected = manual_losses(SingleDeviceStrategy(), parts())
    for rank in found[1]:
        assert rank["manual"] == pytest.approx(expected, rel=2e-6, abs=0)


def test_whole_gradients_and_their_norm_are_those_of_one_device(found):
    net = Net()
    net.training_step(next(batches()), 0).backward()
    expected = net.blocks[0].up.weight.grad
    norm = float(nn.utils.get_total_norm([parameter.grad for parameter in net.parameters()]))
    for rank in found[1]:
        gradient, before, after = rank["gradients"]
        torch.testing.assert_close(gradient.view_as(expected), expected)
        assert before == pytest.approx(norm, rel=1e-5)
        assert after == pytest.approx(norm, rel=1e-5)


def test_where_state_is_sharded_a_step_with_gradients_that_are_not_finite_is_skipped_counted_and_logged(found):
    stage, by_rank = found
    for number, rank in enumerate(by_rank):
        last_loss, skipped, logged = rank["poisoned"]
        assert (skipped, math.isfinite(last_loss)) == ((1, True) if stage else (0, False))
        assert logged == ["step skipped: a gradient is not finite (1 until now)"] * (skipped if number == 0 else 0)


def test_bf16_learns_as_one_device_does(found):
    mixed, single = single_device_losses(precision="bf16-mixed"), single_device_losses()
    for rank in found[1]:
        assert rank["bf16-mixed"] == pytest.approx(mixed, rel=0.05)
        assert rank["bf16-true"] == pytest.approx(single, rel=0.05)  # parameters have eight bits


class Encoder(nn.Module):
    """A module whose parents set parameters of their children."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.apply(self.shrink)
        for parameter in self.layer.linear2.parameters():
            parameter.data.mul_(0.5)

    def shrink(self, part):
        if isinstance(part, nn.LayerNorm):
            part.weight.data.fill_(0.25)


def opened(cluster):
    module = nn.Module()
    module.automatic_optimization = True
    strategy = DeepSpeedStrategy(stage=3)
    strategy.receive(parts(cluster))
    strategy.connect(module)
    strategy.setup_environment()
    return module, strategy


def state_after_setup(module, strategy):
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=0.1)
    strategy.setup(Run(module))
    strategy.teardown()
    return {name: value.clone() for name, value in module.state_dict().items()}


def create(cluster):
    module, strategy = opened(cluster)
    with strategy.model_sharded_context():
        module.encoder = Encoder()
        sharded = [parameter.numel() for parameter in module.encoder.layer.linear1._parameters.plain().values()]
    left = {parameter.numel() for parameter in module.parameters()}
    return sharded, left, state_after_setup(module, strategy)


def test_layers_are_sharded_as_they_are_made_and_keep_what_their_parents_set(ranks):
    expected = {f"encoder.{name}": value for name, value in Encoder().state_dict().items()}
    (*sharded, state), (*other, _) = ranks(create)
    assert sharded == other == [[0, 0], {0}]
    torch.testing.assert_close(state, expected, rtol=0, atol=0)


class Counts(nn.Module):
    """A layer whose values are one number, which the resets of all layers count."""

    resets = 0

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3, 5))
        self.bias = nn.Parameter(torch.empty(3), requires_grad=False)
        self.register_buffer("scale", torch.empty(2, device="meta"))

    def reset_parameters(self):
        Counts.resets += 1
        for tensor in (self.weight, self.bias, self.scale):
            nn.init.constant_(tensor, Counts.resets)


def create_on_meta(cluster):
    Counts.resets = 10 * cluster.global_rank
    module, strategy = opened(cluster)
    with strategy.model_sharded_context(), parameters_on_meta():
        module.layers = nn.Sequential(Counts(), Counts(), nn.Linear(3, 2))
        module.layers[1].weight = module.layers[0].weight
        module.tied = nn.Linear(5, 3)
        module.tied.weight = module.layers[0].weight
        on_meta = all(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))
    left = {parameter.numel() for parameter in module.parameters()}
    is_shared = module.tied.weight is module.layers[0].weight is module.layers[1].weight
    trains = [parameter.requires_grad for parameter in module.layers.parameters()]
    return on_meta, left, is_shared, trains, state_after_setup(module, strategy)


def test_layers_without_memory_get_the_values_of_their_resets_on_rank_0_and_stay_shared(ranks):
    (*facts, state), (*other, _) = ranks(create_on_meta)
    assert facts == other == [True, {0}, True, [True, False, False, True, True]]
    assert state["layers.0.bias"].tolist() == [1, 1, 1]
    assert state["layers.1.bias"].tolist() == [2, 2, 2]
    assert state["layers.1.scale"].tolist() == [2, 2]
    assert set(state["layers.0.weight"].flatten().tolist()) != {
        1
    }  # the last of the layers that share it, as on one device
    assert torch.equal(state["tied.weight"], state["layers.1.weight"])
    assert state["layers.2.weight"].abs().max() > 0


class NoReset(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3))


def create_without_reset(cluster):
    module, strategy = opened(cluster)
    with pytest.raises(MisuseError) as caught, strategy.model_sharded_context(), parameters_on_meta():
        module.first, module.layer = Counts(), NoReset()
    strategy.on_exception(caught.value)
    strategy.teardown()
    # Other ranks notice the failure when nothing refers to the process groups any more.
    return str(caught.value), module.layer.weight.is_meta, hasattr(module.first.weight, "ds_process_group")


def test_a_layer_without_memory_and_without_a_reset_is_an_error_that_says_what_to_write(ranks):
    expected = (
        "NoReset was made without memory, and nothing computes the first values of its 'weight': give it a method "
        "reset_parameters(self)"
    )
    assert ranks(create_without_reset) == [(expected, True, False)] * 2
