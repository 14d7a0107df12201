"""An optimizer of whole parameters gives on shards the losses of one device, and its checkpoints move."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec

import pytest
import torch
from tests.ranks import each, in_ranks
from tests.trainer_runs import Losses, Saves, quiet_trainer
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

from dstrat import Callback, GatheredOptimizer, Pipeline, SingleDeviceStrategy, TrainModule
from dstrat.checkpoint.portable.checkpoint_io import PortableCheckpointIO
from dstrat.checkpoint.torch_file import TorchCheckpointIO
from dstrat.errors import DstratError, RequestError
from dstrat.parallel.optimizer_checks import find_coupling, how_flat_pieces_fail
from dstrat_ddp import DDPStrategy
from dstrat_fsdp import FSDPStrategy
from dstrat_mesh import MeshStrategy

STEPS, SAVED_AT, GLOBAL_BATCH = 8, 4, 64

needs_library = pytest.mark.skipif(not find_spec("pytorch_optimizer"), reason="needs pytorch_optimizer")


class TwoSided(Optimizer):
    """Whitens gradients on both sides; its state has lists, counts, and matrices of other shapes than parameters'."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state |= {"sides": [torch.eye(size) for size in parameter.shape], "count": torch.zeros(())}
                state["count"] += 1
                update = parameter.grad
                for axis, side in enumerate(state["sides"]):
                    flat = parameter.grad.movedim(axis, 0).reshape(len(side), -1)
                    side.addmm_(flat, flat.T)
                    values, vectors = torch.linalg.eigh(side)
                    root = vectors @ torch.diag(values.rsqrt()) @ vectors.T
                    update = torch.tensordot(root, update, dims=([1], [axis])).movedim(0, axis)
                parameter.sub_(update, alpha=group["lr"] / state["count"].item() ** 0.5)


class Coupled(Optimizer):
    """Divides gradients by the norm of all of them."""

    def __init__(self, params, lr=0.02):
        super().__init__(params, {"lr": lr})

    def step(self, closure=None):
        loss = None if closure is None else closure()
        trained = [one for group in self.param_groups for one in group["params"] if one.grad is not None]
        with torch.no_grad():
            self.change(trained)
        return loss

    def change(self, trained):
        norm = torch.linalg.vector_norm(torch.stack([one.grad.norm() for one in trained]))
        for parameter in trained:
            parameter.sub_(parameter.grad / norm, alpha=0.02)


class Noisy(Coupled):
    """Adds random numbers."""

    def change(self, trained):
        for parameter in trained:
            parameter.sub_(parameter.grad + torch.randn_like(parameter), alpha=0.02)


def library(name):
    import pytorch_optimizer

    return getattr(pytorch_optimizer, name)


OPTIMIZERS = {
    "TwoSided": lambda: (TwoSided, {}),
    "Adafactor": lambda: (torch.optim.Adafactor, {"lr": 0.05}),
    "Shampoo": lambda: (library("Shampoo"), {"lr": 0.05, "momentum": 0.5}),
    "SOAP": lambda: (library("SOAP"), {"lr": 0.01, "precondition_frequency": 2}),
}


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Net(TrainModule):
    """Has square matrices, of which each gradient has full rank, and rows that ranks divide unevenly.

    The eigenvectors of other gradients, which SOAP takes, depend on rounding.
    """

    def __init__(self, optimizer, width=6):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(*(Block(width) for _ in range(3)))
        self.optimizer = optimizer

    def configure_model(self):
        if getattr(self.trainer.strategy, "tensor_parallel_size", 1) > 1:
            for block in self.net:
                plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
                parallelize_module(block, self.trainer.strategy.device_mesh["tp"], plan)

    def configure_pipeline(self):
        return Pipeline(model=self.net, loss=lambda output, batch: nn.functional.mse_loss(output, batch[1]))

    def training_step(self, batch, batch_idx):
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        kind, options = OPTIMIZERS.get(self.optimizer, lambda: (globals()[self.optimizer], {}))()
        *others, last = self.parameters()
        optimizer = GatheredOptimizer(kind, [{"params": others}, {"params": [last], "lr": 0.005}], **options)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def fit(make, cluster, optimizer, *, readers=1, ckpt_path=None, callbacks=(), plugins=None):
    losses = Losses()
    plugins = [PortableCheckpointIO()] if plugins is None else plugins
    trainer = quiet_trainer(make(), cluster, plugins=plugins, callbacks=[losses, *callbacks])
    inputs = torch.randn(STEPS * GLOBAL_BATCH, 6, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(inputs, inputs.roll(1, 1) - inputs)
    trainer.fit(Net(optimizer), DataLoader(data, batch_size=GLOBAL_BATCH // readers), ckpt_path=ckpt_path)
    return losses.losses


def outcome(cluster, make, optimizer, readers, folder, first):
    """Return the losses of a run, of one that resumes in its middle, and of one that resumes one device's run."""
    saves = Saves(folder, (SAVED_AT,))
    run = fit(make, cluster, optimizer, readers=readers, callbacks=[saves])
    resumed = fit(make, cluster, optimizer, readers=readers, ckpt_path=folder / str(SAVED_AT))
    return run, resumed, fit(make, cluster, optimizer, readers=readers, ckpt_path=first)


LAYOUTS = {
    2: {
        "ddp": (DDPStrategy, 2),
        "fsdp": (FSDPStrategy, 2),
        "fsdp, offloading": (partial(FSDPStrategy, cpu_offload=True), 2),
        "a pipeline": (partial(MeshStrategy, pp=2), 1),
        "split layers": (partial(MeshStrategy, tp=2), 1),
    },
    4: {
        "fsdp": (FSDPStrategy, 4),
        "replicas of shards": (partial(FSDPStrategy, device_mesh=(2, 2)), 4),
        "shards of split layers": (partial(MeshStrategy, tp=2), 2),
        "shards of stages": (partial(MeshStrategy, pp=2), 2),
    },
}


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.variant)])
@pytest.mark.parametrize(
    "optimizer", ["TwoSided", "Adafactor", *(pytest.param(name, marks=needs_library) for name in ("Shampoo", "SOAP"))]
)
def test_losses_are_those_of_one_device_and_checkpoints_move(optimizer, world_size, tmp_path):
    first = tmp_path / "one device"
    expected = fit(SingleDeviceStrategy, None, optimizer, callbacks=[Saves(first, (SAVED_AT,))])
    assert expected[-1] < 0.95 * expected[0]
    layouts = LAYOUTS[world_size]
    cases = {
        name: {
            "make": make,
            "optimizer": optimizer,
            "readers": readers,
            "folder": tmp_path / name,
            "first": first / str(SAVED_AT),
        }
        for name, (make, readers) in layouts.items()
    }
    for outcomes in in_ranks(each, world_size, function=outcome, cases=cases):
        for name, (run, resumed, moved) in outcomes.items():
            assert run == pytest.approx(expected, rel=1e-6, abs=0), name
            assert resumed == run[SAVED_AT:], name
            assert moved == pytest.approx(expected[SAVED_AT:], rel=1e-6, abs=0), name
    for name in layouts:  # and back to one device
        back = fit(SingleDeviceStrategy, None, optimizer, ckpt_path=tmp_path / name / str(SAVED_AT))
        assert back == pytest.approx(expected[SAVED_AT:], rel=1e-6, abs=0), name


def error_of(cluster, make, optimizer):
    try:
        fit(make, cluster, optimizer, readers=2)
    except DstratError as error:
        return str(error)
    return None


def zero(stage):
    from dstrat_deepspeed import DeepSpeedStrategy

    return DeepSpeedStrategy(stage=stage)


class Unfreezes(Callback):
    """Trains a frozen matrix from some step on, in a group of its own."""

    def __init__(self, step):
        self.step = step

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.global_step == self.step and not module.net[0].up.weight.requires_grad:
            module.net[0].up.weight.requires_grad_()
            trainer.optimizers[0].add_param_group({"params": [module.net[0].up.weight], "lr": 0.03})


class PartlyFrozen(Net):
    def __init__(self):
        super().__init__("TwoSided")
        self.net[0].up.weight.requires_grad_(requires_grad=False)

    def configure_optimizers(self):
        return GatheredOptimizer(TwoSided, [one for one in self.parameters() if one.requires_grad])


class OneGroup(Net):
    def __init__(self):
        super().__init__("TwoSided")

    def configure_optimizers(self):
        return GatheredOptimizer(TwoSided, self.parameters())


def fit_module(cluster, make, module_class, readers=1):
    losses = Losses()
    trainer = quiet_trainer(make(), cluster, callbacks=[losses, Unfreezes(3)])
    inputs = torch.randn(STEPS * GLOBAL_BATCH, 6, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(inputs, inputs.roll(1, 1) - inputs), batch_size=GLOBAL_BATCH // readers)
    trainer.fit(module_class(), loader)
    return losses.losses


def test_a_group_that_is_added_while_training_is_stepped():
    expected = fit_module(None, SingleDeviceStrategy, PartlyFrozen)
    for losses in in_ranks(fit_module, make=FSDPStrategy, module_class=PartlyFrozen, readers=2):
        assert losses == pytest.approx(expected, rel=1e-6, abs=0)


def test_one_group_with_the_parameters_of_all_stages_is_stepped():
    expected = fit_module(None, SingleDeviceStrategy, OneGroup)
    for losses in in_ranks(fit_module, make=partial(MeshStrategy, pp=2), module_class=OneGroup):
        assert losses == pytest.approx(expected, rel=1e-6, abs=0)


def one_file(cluster, make, folder, first):
    """Return the losses of a run, and of those that resume its checkpoints of one file, and one device's."""
    options = {"readers": 1 if cluster is None else cluster.world_size, "plugins": [TorchCheckpointIO()]}
    run = fit(make, cluster, "TwoSided", callbacks=[Saves(folder, (SAVED_AT,))], **options)
    paths = (folder / str(SAVED_AT), first)
    return run, *(fit(make, cluster, "TwoSided", ckpt_path=path, **options) for path in paths)


def test_checkpoints_of_one_file_have_its_state(tmp_path):
    path = tmp_path / "one" / str(SAVED_AT)
    expected = one_file(None, SingleDeviceStrategy, tmp_path / "one", path)
    for run, resumed, moved in in_ranks(one_file, make=FSDPStrategy, folder=tmp_path / "two", first=path):
        assert run == pytest.approx(expected[0], rel=1e-6, abs=0)
        assert resumed == run[SAVED_AT:]
        assert moved == pytest.approx(expected[1], rel=1e-6, abs=0)


class CoupledNet(Net):
    def configure_optimizers(self):
        return Coupled(self.parameters())


def coupled_outcome(cluster, make):
    losses = Losses()
    data = torch.randn(64, 6, generator=torch.Generator().manual_seed(1))
    readers = 1 if cluster is None else cluster.world_size
    try:
        quiet_trainer(make(), cluster, callbacks=[losses]).fit(
            CoupledNet(None), DataLoader(TensorDataset(data, -data), batch_size=16 // readers)
        )
    except DstratError as error:
        return str(error)
    return losses.losses


@pytest.mark.skipif(not find_spec("deepspeed"), reason="needs deepspeed")
def test_deepspeed_refuses_optimizers_that_couple_parameters():
    cases = {stage: {"make": partial(zero, stage)} for stage in range(4)}
    expected = coupled_outcome(None, SingleDeviceStrategy)
    for outcomes in in_ranks(each, function=coupled_outcome, cases=cases):
        assert outcomes[0] == pytest.approx(expected, rel=1e-6, abs=0)
        for stage in (1, 2, 3):
            assert "step flat pieces of some (its step of a parameter depends on the others)" in outcomes[stage]


def test_shards_are_stepped_together_by_optimizers_that_couple_them():
    expected = coupled_outcome(None, SingleDeviceStrategy)
    for found in in_ranks(coupled_outcome, make=FSDPStrategy):
        assert found == pytest.approx(expected, rel=1e-6, abs=0)


@pytest.mark.parametrize(
    ("optimizer", "reason"),
    [("Coupled", "its step of a parameter depends on the others"), ("Noisy", "it draws random numbers")],
)
def test_an_optimizer_that_cannot_step_some_parameters_is_refused(optimizer, reason):
    for message in in_ranks(error_of, make=FSDPStrategy, optimizer=optimizer):
        assert f"{optimizer} cannot step parameters that are divided among ranks ({reason})" in message


class Clips(torch.optim.Optimizer):
    """Clips the norm of all gradients, and then steps as Adam does."""

    def __init__(self, params, lr=0.01, max_norm=20.0):
        super().__init__(params, {"lr": lr, "max_norm": max_norm})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            if group["max_norm"]:
                nn.utils.clip_grad_norm_(group["params"], group["max_norm"])
            for one in group["params"]:
                state = self.state[one]
                moment = state.setdefault("moment", torch.zeros_like(one)).lerp_(one.grad, 0.1)
                square = state.setdefault("square", torch.zeros_like(one)).lerp_(one.grad.square(), 0.01)
                one.addcdiv_(moment, square.sqrt().add_(1e-8), value=-group["lr"])


@pytest.mark.parametrize("max_norm", [1e-2, 1.0, 20.0, 300.0, 1e4, 1e6])
def test_an_optimizer_that_clips_all_gradients_is_known_at_any_threshold(max_norm):
    matrices = nn.Linear(3, 3).parameters()
    assert find_coupling(Clips(matrices, max_norm=max_norm)) == "its step of a parameter depends on the others"


def test_an_optimizer_that_does_not_clip_steps_parameters_apart():
    assert find_coupling(Clips(nn.Linear(3, 3).parameters(), max_norm=0)) is None


class ClipsEach(Clips):
    """Clips the norm of each gradient."""

    def step(self, closure=None):
        (group,) = self.param_groups
        max_norm, group["max_norm"] = group["max_norm"], 0
        for one in group["params"]:
            nn.utils.clip_grad_norm_([one], max_norm)
        super().step()
        group["max_norm"] = max_norm


@pytest.mark.parametrize("max_norm", [20.0, 300.0, 1e4])
def test_an_optimizer_that_clips_each_gradient_needs_whole_ones_at_any_threshold(max_norm):
    optimizer = ClipsEach(nn.Linear(3, 3).parameters(), max_norm=max_norm)
    assert find_coupling(optimizer) is None
    assert how_flat_pieces_fail(optimizer, torch.device("cpu")) == "the results would differ"


@pytest.mark.skipif(not find_spec("deepspeed"), reason="needs deepspeed")
def test_flat_pieces_of_deepspeed_are_refused():
    cases = {stage: {"make": partial(zero, stage), "optimizer": "TwoSided"} for stage in range(4)}
    for messages in in_ranks(each, function=error_of, cases=cases):
        assert messages[0] is None
        for stage in (1, 2, 3):
            assert f"GatheredOptimizer needs whole parameters, and stage {stage} of ZeRO" in messages[stage]


class Bare(Net):
    def configure_optimizers(self):
        return TwoSided(self.parameters())


def bare_error(cluster):
    try:
        quiet_trainer(FSDPStrategy(), cluster).fit(Bare("TwoSided"), DataLoader(torch.randn(8, 6)))
    except DstratError as error:
        return str(error)
    return None


def test_the_error_of_an_optimizer_on_shards_names_it():
    for message in in_ranks(bare_error):
        assert "take dstrat.GatheredOptimizer(TwoSided, ...), which steps full parameters" in message


def test_an_instance_is_refused():
    with pytest.raises(RequestError, match=r"takes the class of an optimizer first, not SGD \("):
        GatheredOptimizer(torch.optim.SGD(nn.Linear(2, 2).parameters()), [])
