"""Averages of weights: those of one device under every strategy, resumed exactly, and moved between strategies."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from tests.ranks import each, in_ranks
from tests.trainer_runs import quiet_trainer
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

from dstrat import Callback, EMAWeightAveraging, StochasticWeightAveraging, TrainModule
from dstrat.checkpoint.torch_file import TorchCheckpointIO
from dstrat.errors import ConflictError
from dstrat.parallel.shards import local_tensor
from dstrat.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from dstrat.training.module.loading import read_checkpoint

DATA = torch.randn(24, 6, generator=torch.Generator().manual_seed(1))
SAVED = (3, 6)  # of two epochs of four steps: within the first, and within the second one


class Net(TrainModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.tied, self.last = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 1)
        self.again = nn.Linear(16, 16)
        self.again.weight = self.tied.weight
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scale", torch.ones(()), persistent=False)

    def forward(self, x):
        return self.last(self.again(self.tied(self.first(x).tanh()).tanh()).tanh()) * self.scale

    def training_step(self, batch, batch_idx):
        self.seen += 1.5
        self.count += 1
        return (self(batch[0]) - batch[0].sum(1, keepdim=True)).square().mean()

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", (self(batch[0]) - batch[0].sum(1, keepdim=True)).square().mean())
        self.log("seen", self.seen.sum())

    test_step = validation_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.02)


class Parallel(Net):
    def configure_model(self):
        mesh = self.device_mesh["tensor_parallel"]
        parallelize_module(self, mesh, {"first": ColwiseParallel(output_layouts=Replicate())})


class Normalized(Net):
    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(self.first, nn.BatchNorm1d(16))


class Record(Callback):
    """Keeps what validation comes to and the last weights, and saves after some steps and in a validation."""

    saves_checkpoints = True

    def __init__(self, folder=None):
        self.folder, self.validated, self.weights = folder, [], {}

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if self.folder is not None and trainer.global_step in SAVED:
            trainer.save_checkpoint(self.folder / str(trainer.global_step))

    def on_validation_epoch_end(self, trainer, module):
        if self.folder is not None:
            trainer.save_checkpoint(self.folder / f"validation {trainer.current_epoch}")

    def on_validation_end(self, trainer, module):
        self.validated.append({name: float(value) for name, value in trainer.callback_metrics.items()})

    def on_train_end(self, trainer, module):
        state = trainer.strategy.module_state_dict()
        self.weights = {name: value.detach().cpu().clone() for name, value in state.items()}


def cases() -> dict[str, dict[str, Any]]:
    made: dict[str, Any] = {
        "ddp": {"strategy": DDPStrategy},
        "fsdp": {"strategy": FSDPStrategy, "shards": True},
        "fsdp, torch file": {"strategy": FSDPStrategy, "checkpoint_io": TorchCheckpointIO},
        "fsdp, offloaded": {"strategy": FSDPStrategy, "cpu_offload": True},
        "fsdp, gathered": {"strategy": FSDPStrategy, "sharding_strategy": "SHARD_GRAD_OP"},
        "model_parallel": {"strategy": ModelParallelStrategy, "net": Parallel, "shares": 1},
    }
    if find_spec("deepspeed"):
        from dstrat_deepspeed import DeepSpeedStrategy

        made |= {f"stage {stage}": {"strategy": DeepSpeedStrategy, "stage": stage} for stage in range(4)}
        made["stage 3"]["shards"] = True
        made["stage 3, torch file"] = {
            "strategy": DeepSpeedStrategy, "stage": 3, "checkpoint_io": TorchCheckpointIO,
        }  # fmt: skip
        made["stage 2, torch file"] = {
            "strategy": DeepSpeedStrategy, "stage": 2, "checkpoint_io": TorchCheckpointIO,
        }  # fmt: skip
    if find_spec("fairscale"):
        from dstrat_fairscale import DDPShardedStrategy

        made["ddp_sharded"] = {"strategy": DDPShardedStrategy}
    return made


VARIANTS = ("fsdp, torch file", "fsdp, gathered", "stage 1", "stage 2", "stage 2, torch file", "stage 3, torch file")
PARAMETERS = [pytest.param(name, marks=[pytest.mark.variant] * (name in VARIANTS)) for name in cases()]


def made_strategy(strategy, *, shards=False, checkpoint_io=None, **options):
    if isinstance(strategy, str):
        return strategy
    return strategy(**options, **({} if checkpoint_io is None else {"checkpoint_io": checkpoint_io()}))


def fit(
    cluster=None, *, net=Net, averaging=None, record=None, ckpt_path=None, precision="32-true", shares=None, **case
):
    shares = shares or (1 if cluster is None else cluster.world_size)
    averaging, record = averaging or EMAWeightAveraging(decay=0.7), record or Record()
    trainer = quiet_trainer(
        made_strategy(**case), cluster, callbacks=[averaging, record], max_epochs=2, num_sanity_val_steps=0,
        precision=precision,
    )  # fmt: skip
    module = net()
    loaders = [DataLoader(TensorDataset(DATA), size) for size in (6 // shares, 12 // shares)]
    trainer.fit(module, *loaders, ckpt_path=ckpt_path)
    return record, averaging


def outcome(cluster, folder, **case):
    """What a fit, and others that resume it, come to."""
    record, averaging = fit(cluster, record=Record(folder), **case)
    exact = {}
    for saved in [*map(str, SAVED), "validation 0"]:
        resumed, _ = fit(cluster, ckpt_path=folder / saved, **case)
        same = all(torch.equal(value, record.weights[name]) for name, value in resumed.weights.items())
        exact[saved] = same and resumed.validated[-1] == record.validated[-1]
    size = sum(value.nbytes for value in averaging._average._averages.values())
    return {"validated": record.validated, "weights": record.weights, "exact": exact, "bytes": size}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {name: tmp_path_factory.mktemp("averages") for name in ("single_device", *cases())}


@pytest.fixture(scope="module")
def on_two_ranks(folders):
    """Return what the fits of a case come to, on each rank; each case has the time limit of a test for itself."""
    return cache(lambda name: in_ranks(outcome, 2, folder=folders[name], **cases()[name]))


@pytest.fixture(scope="module")
def on_one_device(folders):
    return fit(strategy="single_device", record=Record(folders["single_device"]))


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_average_is_that_of_one_device(on_two_ranks, on_one_device, name):
    record, _ = on_one_device
    first, second = on_two_ranks(name)
    assert first["validated"] == second["validated"]
    for mine, expected in zip(first["validated"], record.validated, strict=True):
        assert mine == pytest.approx(expected, rel=1e-5)
    assert first["weights"].keys() == record.weights.keys()
    for key, value in first["weights"].items():
        torch.testing.assert_close(value, record.weights[key], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_resumed_average_is_the_same_to_the_bit(on_two_ranks, name):
    assert [of_rank["exact"] for of_rank in on_two_ranks(name)] == [dict.fromkeys(["3", "6", "validation 0"], True)] * 2


@pytest.mark.parametrize("name", [name for name, case in cases().items() if case.get("shards")])
def test_the_average_of_shards_takes_their_share(on_two_ranks, name):
    whole = on_two_ranks("ddp")[0]["bytes"]
    for of_rank in on_two_ranks(name):
        assert of_rank["bytes"] < 0.6 * whole


def close(weights, expected):
    assert weights.keys() == expected.keys()
    for name, value in weights.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", PARAMETERS)
def test_one_device_resumes_the_average_of_several_ranks(on_two_ranks, on_one_device, folders, name):
    record, _ = on_one_device
    on_two_ranks(name)
    resumed, _ = fit(strategy="single_device", ckpt_path=folders[name] / "6")
    close(resumed.weights, record.weights)
    saved = read_checkpoint(folders[name] / "validation 1")["state_dict"]  # what an evaluation loads
    close(saved, {key: record.weights[key] for key in saved})


@pytest.mark.parametrize("name", PARAMETERS)
def test_several_ranks_resume_the_average_of_one_device(on_one_device, folders, name):
    record, _ = on_one_device
    path = folders["single_device"] / "6"
    for weights in in_ranks(resumed_weights, 2, ckpt_path=path, **cases()[name]):
        assert weights.keys() <= record.weights.keys()  # some strategies have all of them on rank 0
        close(weights, {key: record.weights[key] for key in weights})


def resumed_weights(cluster, **case):
    return fit(cluster, **case)[0].weights


def test_statistics_of_batch_norm_are_averaged_and_resumed(tmp_path):
    some = {name: case for name, case in cases().items() if name in ("ddp", "fsdp", "stage 3")}
    made = {name: {"folder": tmp_path / name, "net": Normalized, **case} for name, case in some.items()}
    first, second = in_ranks(each, 2, function=outcome, cases=made)
    for name in some:
        assert all(first[name]["exact"].values())
        assert all(second[name]["exact"].values())
        assert first[name]["validated"] == second[name]["validated"]
        statistics = first[name]["weights"]["first.1.running_mean"]
        torch.testing.assert_close(statistics, first["ddp"]["weights"]["first.1.running_mean"])


def test_averages_of_epochs_work_with_shards():
    expected, _ = fit(strategy="single_device", averaging=stochastic())
    some = {name: case for name, case in cases().items() if name in ("fsdp", "stage 2", "stage 3")}
    first, _ = in_ranks(each, 2, function=stochastic_weights, cases=some)
    for weights in first.values():
        close(weights, expected.weights)


def stochastic():
    return StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1, annealing_epochs=0)


def stochastic_weights(cluster, **case):
    return fit(cluster, averaging=stochastic(), **case)[0].weights


def test_weights_in_16_bits_have_an_average_in_32(tmp_path):
    """Of 16 bits it would not move by a hundredth of a small difference."""
    some = {name: case for name, case in cases().items() if name in ("ddp", "fsdp", "stage 1", "stage 3")}
    made = {name: {"folder": tmp_path / name, **case} for name, case in some.items()}
    first, second = in_ranks(each, 2, function=in_16_bits, cases=made)
    for name, outcome_ in first.items():
        assert outcome_["exact"]
        assert second[name]["exact"]
        assert outcome_["dtypes"] == {"state_dict": torch.float32, "current_model_state": torch.bfloat16}
        assert outcome_["distance"] < 1e-6


class Exact(Callback):
    """Keeps an average of the weights, as forward passes use them, in 64 bits."""

    def __init__(self):
        self.average = None

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        weights = trainer.strategy.local_weights()
        values = {name: local_tensor(value).double() for name, value in weights.items() if name.endswith("weight")}
        if self.average is None:
            self.average = values
        self.average = {name: 0.99 * self.average[name] + 0.01 * value for name, value in values.items()}


def in_16_bits(cluster, folder, **case):
    options = {"precision": "bf16-true", **case}
    averaging, record, exact = EMAWeightAveraging(decay=0.99), Record(folder), Exact()
    trainer = quiet_trainer(
        made_strategy(**case), cluster, callbacks=[averaging, exact, record], max_epochs=2, num_sanity_val_steps=0,
        precision="bf16-true",
    )  # fmt: skip
    trainer.fit(Net(), *(DataLoader(TensorDataset(DATA), size) for size in (3, 6)))
    resumed, again = fit(cluster, averaging=EMAWeightAveraging(decay=0.99), ckpt_path=folder / "6", **options)
    same = all(torch.equal(value, record.weights[name]) for name, value in resumed.weights.items())
    mine, other = averaging._average._averages, again._average._averages
    saved = read_checkpoint(folder / "3")
    keys = ("state_dict", "current_model_state")
    return {
        "exact": same and all(torch.equal(value, other[name]) for name, value in mine.items()),
        "dtypes": {key: saved[key]["first.weight"].dtype for key in keys},
        "distance": max(float((mine[name] - value).norm()) for name, value in exact.average.items() if name in mine),
    }


@pytest.mark.skipif(not find_spec("fairscale"), reason="FairScale is not installed")
def test_a_strategy_that_cannot_says_why():
    from dstrat_fairscale import DDPFullyShardedStrategy

    with pytest.raises(ConflictError, match="joins parameters without their names"):
        DDPFullyShardedStrategy().local_weights()


class Written(Callback):
    """Writes weights at the end of an epoch, before the callback that averages them has its turn."""

    def __init__(self, averaging):
        self.averaging = averaging

    def on_train_epoch_end(self, trainer, module):
        with self.averaging.average_in_module(trainer):
            self.average = module.last.weight.detach().clone()
        self.current = module.last.weight.detach().clone()


def test_a_callback_writes_the_average_within_a_training():
    averaging = EMAWeightAveraging(decay=0.9)
    written, net = Written(averaging), Net()
    trainer = quiet_trainer("single_device", callbacks=[written, averaging], num_sanity_val_steps=0)
    trainer.fit(net, DataLoader(TensorDataset(DATA), 6))
    torch.testing.assert_close(net.last.weight, written.average, rtol=0, atol=0)  # which the fit leaves in the module
    assert not torch.equal(written.current, written.average)
