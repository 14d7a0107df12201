"""Muon gives with every strategy the losses of one device, resumes exactly, and its checkpoints move."""

from __future__ import annotations

import copy
import weakref
from functools import partial
from importlib.util import find_spec

import pytest
import torch
from tests.ranks import each, in_ranks
from tests.trainer_runs import Losses, Saves, quiet_trainer
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

from dstrat import Muon, Pipeline, SingleDeviceStrategy, TrainModule
from dstrat.checkpoint.portable.checkpoint_io import PortableCheckpointIO
from dstrat.errors import DstratError, RequestError
from dstrat.parallel.internals import RecordedCollectives
from dstrat_ddp import DDPStrategy
from dstrat_fsdp import FSDPStrategy
from dstrat_mesh import MeshStrategy

STEPS, SAVED_AT, GLOBAL_BATCH = 8, 4, 16


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Net(TrainModule):
    """Has matrices of three shapes, with rows that ranks divide unevenly."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 10), *(Block(10) for _ in range(3)), nn.Linear(10, 1))
        self.dtype_of_iterations = dtype

    def configure_model(self):
        if getattr(self.trainer.strategy, "tensor_parallel_size", 1) > 1:
            for block in self.net[1:-1]:
                plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
                parallelize_module(block, self.trainer.strategy.device_mesh["tp"], plan)

    def configure_pipeline(self):
        return Pipeline(model=self.net, loss=lambda output, batch: nn.functional.mse_loss(output, batch[1]))

    def training_step(self, batch, batch_idx):
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return Muon.of_module(
            self, adamw_layers=["net.4"], lr=0.02, adamw={"lr": 0.01}, ns_dtype=self.dtype_of_iterations
        )


def fit(make, cluster, *, readers=1, dtype=torch.float32, ckpt_path=None, callbacks=(), precision=None):
    losses = Losses()
    trainer = quiet_trainer(
        make(), cluster, plugins=[PortableCheckpointIO()], callbacks=[losses, *callbacks], precision=precision
    )
    inputs = torch.randn(STEPS * GLOBAL_BATCH, 6, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(inputs, inputs[:, :1] * inputs[:, 1:2])
    trainer.fit(Net(dtype), DataLoader(data, batch_size=GLOBAL_BATCH // readers), ckpt_path=ckpt_path)
    return losses.losses


def outcome(cluster, make, readers, folder, first):
    """Return the losses of a run, of one that resumes in its middle, and of one that resumes one device's run."""
    saves = Saves(folder, (SAVED_AT,))
    run = fit(make, cluster, readers=readers, callbacks=[saves])
    resumed = fit(make, cluster, readers=readers, ckpt_path=folder / str(SAVED_AT))
    return run, resumed, fit(make, cluster, readers=readers, ckpt_path=first)


LAYOUTS = {
    2: {
        "ddp": (DDPStrategy, 2),
        "fsdp": (FSDPStrategy, 2),
        "fsdp, offloading": (partial(FSDPStrategy, cpu_offload=True), 2),
        "a pipeline": (partial(MeshStrategy, pp=2), 1),
    },
    4: {
        "fsdp": (FSDPStrategy, 4),
        "replicas of shards": (partial(FSDPStrategy, device_mesh=(2, 2)), 4),
        "split layers": (partial(MeshStrategy, tp=2), 2),
        "split layers of replicas": (partial(MeshStrategy, tp=2, dp_replicate=2), 2),
    },
}


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.variant)])
def test_losses_are_those_of_one_device_and_checkpoints_move(world_size, tmp_path):
    first = tmp_path / "one device"
    expected = fit(SingleDeviceStrategy, None, callbacks=[Saves(first, (SAVED_AT,))])
    assert expected[-1] < 0.9 * expected[0]
    cases = {
        name: {"make": make, "readers": readers, "folder": tmp_path / name, "first": first / str(SAVED_AT)}
        for name, (make, readers) in LAYOUTS[world_size].items()
    }
    for outcomes in in_ranks(each, world_size, function=outcome, cases=cases):
        for name, (run, resumed, moved) in outcomes.items():
            assert run == pytest.approx(expected, rel=1e-6, abs=0), name
            assert resumed == run[SAVED_AT:], name
            assert moved == pytest.approx(expected[SAVED_AT:], rel=1e-6, abs=0), name
    for name in cases:  # and back to one device
        back = fit(SingleDeviceStrategy, None, ckpt_path=tmp_path / name / str(SAVED_AT))
        assert back == pytest.approx(expected[SAVED_AT:], rel=1e-6, abs=0), name


def zero(stage):
    from dstrat_deepspeed import DeepSpeedStrategy

    return DeepSpeedStrategy(stage=stage)


def losses_or_error(cluster, make):
    try:
        return fit(make, cluster, readers=2)
    except DstratError as error:
        return str(error)


@pytest.mark.skipif(not find_spec("deepspeed"), reason="needs deepspeed")
def test_deepspeed_trains_with_it_where_parameters_keep_their_shape():
    cases = {stage: {"make": partial(zero, stage)} for stage in range(4)}
    expected = fit(SingleDeviceStrategy, None)
    for outcomes in in_ranks(each, function=losses_or_error, cases=cases):
        assert outcomes[0] == pytest.approx(expected, rel=1e-6, abs=0)
        for stage in (1, 2, 3):
            assert f"Muon needs whole parameters, and stage {stage} of ZeRO" in outcomes[stage]
            assert "Muon is for matrices" in outcomes[stage]


def test_matrices_step_as_by_torchs_muon_and_others_as_by_its_adamw():
    module, other = Net(torch.bfloat16), Net()
    ours = Muon(module.parameters(), lr=0.02, adjust_lr_fn="match_rms_adamw", adamw={"lr": 0.01})
    torchs = (
        torch.optim.Muon([p for p in other.parameters() if p.dim() == 2], lr=0.02, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([p for p in other.parameters() if p.dim() != 2], lr=0.01),
    )
    batch = torch.randn(8, 6), torch.randn(8, 1)
    for _ in range(3):
        for net, optimizers in ((module, (ours,)), (other, torchs)):
            net.zero_grad()
            net.training_step(batch, 0).backward()
            for optimizer in optimizers:
                optimizer.step()
    for one, two in zip(module.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=0.02 * 3 * 0.02)  # of three steps in bfloat16


def bytes_of_a_step(cluster, dtype):
    strategy, count = FSDPStrategy(), []

    class Counts(Saves):
        def on_before_optimizer_step(self, trainer, module, optimizer):
            if trainer.global_step == 2:  # torch propagates the layouts of new operations by others
                recorded = RecordedCollectives()
                with recorded:
                    optimizer.step()
                count.extend(recorded.collectives)

    fit(lambda: strategy, cluster, readers=2, dtype=dtype, callbacks=[Counts("unused", ())])
    return [(one.kind, one.bytes) for one in count]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_sends_each_shard_once_and_its_result_back(dtype):
    numel = sum(p.numel() for p in Net().parameters() if p.dim() == 2) - 10
    sent = in_ranks(bytes_of_a_step, dtype=dtype)
    for collectives in sent:
        assert [kind for kind, _ in collectives] == ["all_to_all"] * 2
    # The larger of what a rank sends and receives; it sends all of its shards once, and gathers about half of the work.
    assert max(size for collectives in sent for _, size in collectives) <= 0.7 * numel * dtype.itemsize


# Groups


def test_embeddings_and_named_layers_belong_to_adamw():
    net = nn.ModuleDict({"table": nn.Embedding(4, 3), "inner": nn.Linear(3, 3), "head": nn.Linear(3, 2)})
    optimizer = Muon.of_module(net, adamw_layers=["head"], adamw={"betas": (0.8, 0.9)})
    matrices, others = optimizer.param_groups
    assert matrices["params"] == [net["inner"].weight]
    assert len(others["params"]) == 4
    assert (matrices["use_muon"], others["use_muon"], others["betas"]) == (True, False, (0.8, 0.9))
    assert "ns_steps" not in others


def test_a_group_that_does_not_say_so_is_divided_between_muon_and_adamw():
    net = nn.ModuleDict({"table": nn.Embedding(4, 3), "inner": nn.Linear(3, 3), "head": nn.Linear(3, 2)})
    net["table"].requires_grad_(requires_grad=False)
    net["head"].requires_grad_(requires_grad=False)
    net, optimizer = copy.deepcopy((net, Muon.of_module(net, adamw={"betas": (0.8, 0.9)})))
    added = [*net["table"].parameters(), *net["head"].parameters()]
    optimizer.add_param_group({"params": added, "lr": 0.5})
    matrices, others = optimizer.param_groups[2:]
    assert matrices["params"] == [net["head"].weight]
    assert [id(one) for one in others["params"]] == [id(net["table"].weight), id(net["head"].bias)]
    assert (matrices["lr"], others["lr"], others["betas"]) == (0.5, 0.5, (0.8, 0.9))
    named = Muon([{"params": nn.Linear(3, 2).named_parameters()}])
    assert [group["param_names"] for group in named.param_groups] == [["weight"], ["bias"]]
    with pytest.raises(RequestError, match="shape"):
        optimizer.add_param_group({"params": [torch.ones(2), torch.ones(2, 2)], "use_muon": True})
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": [torch.ones(2, 2), net["head"].bias]})
    assert len(optimizer.param_groups) == 4


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda net: Muon([{"params": net.parameters(), "use_muon": True}]),
            r"Muon is for matrices.*shape \(2,\).*use_muon",
        ),
        (
            lambda net: Muon([nn.Parameter(torch.ones(8))]),
            "none of 1 parameters is one for it.*choose one that shards each parameter",
        ),
        (lambda net: Muon([{"params": [nn.Parameter(torch.ones(8))]}]), "none of 1 parameters is one for it"),
        (lambda net: Muon.of_module(net, adamw_layers=["last"]), "adamw_layers has 'last', and Sequential has no such"),
        (lambda net: Muon(net.parameters(), adjust_lr_fn="x"), "adjust_lr_fn 'x' is not one of 'original', 'match_"),
    ],
    ids=["a vector", "no matrix", "a group without", "a layer", "a function"],
)
def test_an_impossible_option_is_refused(make, message):
    with pytest.raises(RequestError, match=message):
        make(nn.Sequential(nn.Linear(3, 2)))


def test_weights_that_a_strategy_has_replaced_are_freed():
    net = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4))
    optimizer = Muon.of_module(net)
    replaced = weakref.ref(net[0].weight)
    net[0].weight = nn.Parameter(torch.zeros(4, 4))  # as a shard
    for group in optimizer.param_groups:
        group["params"] = [net[0].weight if parameter is replaced() else parameter for parameter in group["params"]]
    assert replaced() is None
