"""What a training can have besides a loss: gradients, groups, shared parameters, precisions, skipped steps."""

import logging

import pytest
import torch
from deepspeed_loop import Net, batches, losses_of, parts, share, single_device_losses, start, train
from torch import nn
from torch.utils.checkpoint import checkpoint

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
    for index, batch in enumerate(batches()):
        losses.append(float(strategy.reduce(strategy.training_step(share(strategy, batch), index))))
    strategy.teardown()
    return losses


def plain(parameter):
    return not vars(parameter) and parameter.grad is None and parameter.numel() > 0


def train_everything(cluster, stage):
    shared, net = Shared(), Net()
    linear = nn.functional.linear
    found = {
        "shared": losses_of(DeepSpeedStrategy(stage=stage), shared, parts(cluster)),
        "manual": manual_losses(DeepSpeedStrategy(stage=stage), parts(cluster)),
        "plain again": all(plain(parameter) for parameter in shared.parameters()),
        "shapes": [tuple(parameter.shape) for parameter in shared.parameters()],
        "tied": shared.tied.weight is shared.again.weight,
        "dicts": {type(part._parameters).__name__ for part in shared.modules()},
        "own linear": nn.functional.linear is linear,
    }
    strategy = DeepSpeedStrategy(stage=stage)
    start(strategy, net, parts(cluster))
    optimizer = strategy.optimizers[0]
    first = next(batches())
    for _ in range(2):  # the first gradients are thrown away
        optimizer.zero_grad()
        strategy.backward(strategy.training_step(share(strategy, first), 0))
    found["gradient"] = strategy.full_grad(net.blocks[0].up.weight).clone()
    found["norm before"] = strategy.grad_norm()
    strategy.clip_gradients(optimizer, 0.01)
    strategy.optimizer_step(optimizer, lambda: None)
    found["norm after"] = strategy.grad_norm()
    strategy.teardown()
    return found


def single_gradient():
    net = Net()
    net.training_step(next(batches()), 0).backward()
    return net.blocks[0].up.weight.grad, float(nn.utils.get_total_norm([p.grad for p in net.parameters()]))


@pytest.fixture(scope="module")
def expected():
    from dstrat.builtin.strategies.single_device import SingleDeviceStrategy

    return {
        "shared": single_device_losses(Shared()),
        "manual": manual_losses(SingleDeviceStrategy(), parts()),
        "shapes": [tuple(parameter.shape) for parameter in Shared().parameters()],
    }


@pytest.mark.parametrize("stage", STAGES)
def test_groups_shared_frozen_unused_parameters_manual_optimization_and_whole_gradients(ranks, expected, stage):
    gradient, norm = single_gradient()
    for found in ranks(train_everything, stage=stage):
        assert found["shared"] == pytest.approx(expected["shared"], rel=2e-6, abs=0)
        assert found["manual"] == pytest.approx(expected["manual"], rel=2e-6, abs=0)
        torch.testing.assert_close(found["gradient"].view_as(gradient), gradient)
        assert found["norm before"] == pytest.approx(norm, rel=1e-5)
        assert found["norm after"] == pytest.approx(norm, rel=1e-5)
        assert found["plain again"]
        assert found["shapes"] == expected["shapes"]
        assert found["tied"]
        assert found["dicts"] == {"dict"}
        assert found["own linear"]


class Poisoned(Net):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * float("nan") if batch_idx == 1 else loss


def skip_steps(cluster, stage, precision):
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    logging.getLogger("dstrat_deepspeed").addHandler(handler)
    strategy = DeepSpeedStrategy(stage=stage)
    start(strategy, Poisoned(), parts(cluster, precision))
    losses = train(strategy, steps=3)
    skipped = strategy.skipped_steps
    strategy.teardown()
    return losses, skipped, [record.getMessage() for record in records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_step_with_gradients_that_are_not_finite_is_skipped_counted_and_logged(ranks, stage):
    for losses, skipped, logged in ranks(skip_steps, stage=stage, precision="32-true"):
        assert losses[2] == losses[2]  # parameters stayed finite
        assert skipped == 1
        assert logged == ["step skipped: a gradient is not finite (1 until now)"]


def precise_losses(cluster, stage):
    return {
        precision: losses_of(DeepSpeedStrategy(stage=stage), Net(), parts(cluster, precision))
        for precision in ("bf16-true", "bf16-mixed")
    }


@pytest.mark.parametrize("stage", STAGES)
def test_bf16_learns_as_one_device_does(ranks, stage):
    mixed = single_device_losses(precision="bf16-mixed")
    single = single_device_losses()
    for found in ranks(precise_losses, stage=stage):
        assert found["bf16-mixed"] == pytest.approx(mixed, rel=0.05)
        assert found["bf16-true"] == pytest.approx(single, rel=0.05)  # parameters have eight bits


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


def create(cluster):
    module = nn.Module()
    module.automatic_optimization = True
    strategy = DeepSpeedStrategy(stage=3)
    strategy.receive(parts(cluster))
    strategy.connect(module)
    strategy.setup_environment()
    with strategy.model_sharded_context():
        module.encoder = Encoder()
        sharded = [parameter.numel() for parameter in module.encoder.layer.linear1._parameters.plain().values()]
    left = {parameter.numel() for parameter in module.parameters()}
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=0.1)
    from deepspeed_loop import Run

    strategy.setup(Run(module))
    strategy.teardown()
    return sharded, left, {name: value.clone() for name, value in module.state_dict().items()}


def test_layers_are_sharded_as_they_are_made_and_keep_what_their_parents_set(ranks):
    expected = {f"encoder.{name}": value for name, value in Encoder().state_dict().items()}
    for sharded, left, state in ranks(create):
        assert sharded == [0, 0]
        assert left == {0}
        torch.testing.assert_close(state, expected, rtol=0, atol=0)


def accumulate_differently(cluster, stage):
    """Change the number of accumulated batches during a training, as GradientAccumulationScheduler does."""
    strategy = DeepSpeedStrategy(stage=stage)
    start(strategy, Net(), parts(cluster), accumulate=1)
    losses = train(strategy, steps=3) + train(strategy, steps=3, accumulate=3)
    strategy.teardown()
    return losses


@pytest.mark.parametrize("stage", STAGES)
def test_accumulation_may_change_during_a_training(ranks, stage):
    from dstrat.builtin.strategies.single_device import SingleDeviceStrategy

    strategy = SingleDeviceStrategy()
    start(strategy, Net(), parts())
    expected = train(strategy, steps=3) + train(strategy, steps=3, accumulate=3)
    for losses in ranks(accumulate_differently, stage=stage):
        assert losses == pytest.approx(expected, rel=1e-6, abs=0)
