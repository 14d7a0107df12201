"""Losses of a pipeline: values for each sample that are no tensors, dtypes, logging, and loss scaling."""

import dataclasses
from typing import NamedTuple

import numpy as np
import pytest
import torch
from packages.mesh.tests.test_pipeline import HalfFrozen, PipeNet
from tests.hand_loop import batches as hand_batches
from tests.hand_loop import one_pass, parts, start
from tests.ranks import in_ranks
from tests.trainer_runs import quiet_trainer
from torch import nn
from torch.utils.data import DataLoader

from dstrat import TrainModule
from dstrat.builtin.precision.mixed import MixedPrecision
from dstrat.builtin.single_device import SingleDeviceStrategy
from dstrat.errors import MisuseError
from dstrat.interfaces.pipeline import Pipeline, split_batch
from dstrat.parallel.shards import local_tensor
from dstrat_mesh import MeshStrategy


class Net(TrainModule):
    """Its targets are a list of numbers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 3))
        self.losses = []

    def loss(self, output, batch):
        return torch.stack(
            [(row - target).square().mean() for row, target in zip(output, batch[1], strict=True)]
        ).mean()

    def configure_pipeline(self):
        return Pipeline(model=self.net, loss=self.loss)

    def training_step(self, batch, batch_idx):
        return self.loss(self.net(batch[0]), batch)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.losses.append(outputs["loss"].detach().cpu())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


def collate(rows):
    return torch.stack([inputs for inputs, _ in rows]), [target for _, target in rows]


def batches(size=4):
    generator = torch.Generator().manual_seed(0)
    rows = [(torch.randn(6, generator=generator), float(index % 5)) for index in range(16)]
    return DataLoader(rows, batch_size=size, collate_fn=collate)


def losses(cluster, module_class=Net, pipeline=None, **options):
    strategy = "single_device" if cluster is None else MeshStrategy(pp=2, **pipeline or {})
    module = module_class()
    quiet_trainer(strategy, cluster, **options).fit(module, batches())
    return module.losses


@pytest.mark.parametrize("microbatches", [2, 3])
def test_a_list_of_targets_is_divided_with_its_samples(microbatches):
    expected = losses(None)
    for found in in_ranks(losses, 2, pipeline={"microbatches": microbatches}):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


class WeightedNet(Net):
    """The loss of a batch is a mean over numbers of targets."""

    def configure_pipeline(self):
        return dataclasses.replace(super().configure_pipeline(), weight=lambda batch: len(batch[1]))


@pytest.mark.parametrize("module_class", [Net, WeightedNet])
def test_losses_of_float64_have_its_digits(module_class):
    expected = losses(None, precision="64-true")
    assert expected[0].dtype == torch.float64
    for found in in_ranks(losses, 2, module_class=module_class, precision="64-true", pipeline={"microbatches": 3}):
        torch.testing.assert_close(found, expected, rtol=1e-13, atol=0)


class Image(NamedTuple):
    pixels: torch.Tensor
    size: tuple[int, int] = (4, 4)


@dataclasses.dataclass
class Record:
    names: tuple[str, ...]
    targets: np.ndarray
    classes: list[str]


def test_what_has_a_value_for_each_sample_is_divided_and_everything_else_is_in_each_microbatch():
    record = Record(names=("a", "b", "c"), targets=np.arange(6).reshape(3, 2), classes=["cat", "dog"])
    batch = {
        "image": Image(torch.arange(3.0)),
        "record": record,
        "boxes": [[1, 2], [3], []],
        "scalars": [torch.tensor(1), torch.tensor(2), torch.tensor(3)],
        "factor": torch.tensor(2.0),
        "name": "abc",
        "shape": torch.Size((3, 1, 1)),
    }
    first, second = split_batch(batch, 2)
    assert (first["image"].pixels.tolist(), second["image"].pixels.tolist()) == ([0.0, 1.0], [2.0])
    assert first["image"].size == second["image"].size == (4, 4)
    assert (first["record"].names, second["record"].names) == (("a", "b"), ("c",))
    assert second["record"].targets.tolist() == [[4, 5]]
    assert second["record"].classes == ["cat", "dog"]
    assert (first["boxes"], second["boxes"]) == ([[1, 2], [3]], [[]])
    assert second["scalars"] == [3]
    for name in ("factor", "name", "shape"):
        assert first[name] is second[name] is batch[name]
    assert split_batch(batch, 1) == [batch]


def test_a_square_of_lists_is_refused():
    with pytest.raises(MisuseError, match="a batch of 2 samples has 2 lists of 2 values, and either may be"):
        split_batch((torch.zeros(2, 1), [[1, 2], [3, 4]]), 2)


class LoggingNet(Net):
    """Logs in its loss, or when the loss of a batch is known."""

    def __init__(self, place):
        super().__init__()
        self.place = place

    def loss(self, output, batch):
        if self.place == "loss":
            self.log("positive", (output > 0).float().mean())
        return super().loss(output, batch)

    def configure_pipeline(self):
        on_loss = (lambda loss: self.log("loss", loss)) if self.place == "on_loss" else None
        return Pipeline(model=self.net, loss=self.loss, on_loss=on_loss)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss


def logged(cluster, place):
    trainer = quiet_trainer("single_device" if cluster is None else MeshStrategy(pp=2), cluster)
    trainer.fit(LoggingNet(place), batches())
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def test_the_loss_of_a_batch_is_logged_on_all_ranks():
    expected = logged(None, "on_loss")
    for found in in_ranks(logged, 2, place="on_loss"):
        assert found == pytest.approx(expected, rel=1e-6)


def test_values_that_the_last_stage_alone_would_log_are_refused():
    with pytest.raises(pytest.fail.Exception) as failure:
        in_ranks(logged, 2, place="loss")
    assert "rank 1 of 2" in str(failure.value)
    assert "log('positive') in the loss or a layer of the pipeline would give values of" in str(failure.value)


class Counted(nn.Module):
    """A loss that counts its samples."""

    def __init__(self):
        super().__init__()
        self.register_buffer("samples", torch.zeros(()))

    def forward(self, output):
        self.samples += len(output)
        return output.square().mean()


class StatefulNet(Net):
    """Its loss changes a metric, a buffer, an attribute, or nothing."""

    def __init__(self, state):
        super().__init__()
        import torchmetrics

        self.state, self.mean, self.counted = state, torchmetrics.MeanMetric(), Counted()
        self.register_buffer("center", torch.zeros(3))
        self.calls = 0

    def loss(self, output, batch):
        if self.state == "mean":
            self.mean.update(output.detach())
        if self.state == "center":
            self.center = output.detach().mean(0)
        if self.state == "calls":
            self.calls += 1
        return self.counted(output) if self.state == "counted.samples" else (output - self.center).square().mean()


def with_state(cluster, state):
    module = StatefulNet(state)
    quiet_trainer(MeshStrategy(pp=2), cluster).fit(module, batches())
    return len(module.losses)


def test_a_loss_may_read_state_of_the_module():
    assert in_ranks(with_state, state=None) == [4, 4]


@pytest.mark.parametrize("state", ["mean", "center", "calls", "counted.samples"])
def test_a_loss_that_changes_state_of_the_module_is_refused(state):
    with pytest.raises(pytest.fail.Exception) as failure:
        in_ranks(with_state, state=state)
    assert "rank 1 of 2" in str(failure.value)
    assert f"the loss of the pipeline has changed {state!r}, which only the ranks of the last" in str(failure.value)


class Penalized(Net):
    """Its loss has a penalty on weights of the first stage, or on all.

    Attributes:
        penalty: The function of the module that returns it.
    """

    def __init__(self, penalty):
        super().__init__()
        self.penalty = penalty

    def loss(self, output, batch):
        return super().loss(output, batch) + self.penalty(self)


PENALTIES = {
    "the first weight": lambda module: 0.1 * module.net[0].weight.square().sum(),
    "all weights": lambda module: sum(weight.norm() for weight in module.parameters()),
    "a number": lambda module: module.net[0].weight.norm().item(),
}


def penalized(cluster, penalty):
    quiet_trainer(MeshStrategy(pp=2), cluster).fit(Penalized(PENALTIES[penalty]), batches())


@pytest.mark.parametrize("penalty", PENALTIES)
def test_weights_of_other_stages_in_a_loss_are_refused(penalty):
    with pytest.raises(pytest.fail.Exception) as failure:
        in_ranks(penalized, penalty=penalty)
    assert "rank 1 of 2" in str(failure.value)
    assert "the loss of the pipeline of Penalized has used weights of other stages" in str(failure.value)


# Loss scaling


def scaled(cluster, frozen=False, **options):
    """Train with a scale at which gradients overflow at first; return losses, scales, and which steps were skipped."""
    strategy = SingleDeviceStrategy() if cluster is None else MeshStrategy(pp=2, **options)
    # Between scales at which all gradients are finite, and at which some never are.
    factors = {"growth_factor": 2.0**10, "backoff_factor": 2.0**-10}
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**23, growth_interval=3, **factors)
    precision = MixedPrecision("16-mixed", scaler=scaler)
    start(
        strategy, (HalfFrozen if frozen else PipeNet)(), dataclasses.replace(parts(cluster), precision_plugin=precision)
    )
    found, [optimizer] = [], strategy.optimizers
    for index, batch in enumerate(hand_batches(12)):
        before = [local_tensor(weight).clone() for weight in strategy.local_weights().values()]

        def closure(batch=batch, index=index):
            optimizer.zero_grad()
            loss = one_pass(strategy, batch, index, accumulate=1)
            strategy.clip_gradients(optimizer, 0.5)
            return loss

        loss = strategy.reduce(strategy.optimizer_step(optimizer, closure, strategy.model))
        after = map(local_tensor, strategy.local_weights().values())
        skipped = all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
        found.append((float(loss), precision.state_dict()["scale"], skipped))
    strategy.teardown()
    return found


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (2, {}),
        (2, {"frozen": True}),
        (4, {"dp_shard": 2, "microbatches": 4}),
        (4, {"dp_shard": 2, "schedule": "InterleavedZeroBubble"}),
    ],
)
def test_all_stages_skip_the_steps_in_which_a_gradient_overflows(ranks, options):
    expected = scaled(None, frozen=options.get("frozen", False))
    assert [step for step, (*_, skipped) in enumerate(expected) if skipped] == [0, 4, 8]
    found = in_ranks(scaled, ranks, **options)
    for of_rank in found:
        assert [loss for loss, *_ in of_rank] == pytest.approx([loss for loss, *_ in expected], rel=0.02)
        assert [scale for _, scale, _ in of_rank] == [scale for _, scale, _ in expected]
    # A rank of a frozen stage never changes its weights.
    assert [skipped for *_, skipped in found[-1]] == [skipped for *_, skipped in expected]


# Norms of gradients


class NormNet(Net):
    """Logs the norm of the gradients before they are clipped."""

    def configure_gradient_clipping(self, optimizer, gradient_clip_val, gradient_clip_algorithm):
        before = torch.nn.utils.get_total_norm(
            parameter.grad for parameter in self.parameters() if not parameter.is_meta
        )
        norm = self.trainer.strategy.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
        self.log("norm", before if norm is None else norm, on_step=True)


def logged_norm(cluster):
    trainer = quiet_trainer("single_device" if cluster is None else MeshStrategy(pp=2), cluster, gradient_clip_val=0.1)
    trainer.fit(NormNet(), batches())
    return float(trainer.callback_metrics["norm"])


def test_a_logged_norm_is_that_of_the_gradients_of_all_stages():
    expected = logged_norm(None)
    assert in_ranks(logged_norm) == [pytest.approx(expected, rel=1e-6)] * 2
