"""One process for several devices: dp, and ddp2 with one such process per machine."""

import dataclasses
import math
from typing import NamedTuple

import pytest
import torch
from tests.hand_loop import Net, batches, parts, share, single_device_losses, start, train
from tests.ranks import each, in_ranks

from dstrat.builtin.accelerators.cpu import CPUAccelerator
from dstrat.errors import MisuseError
from dstrat_ddp import DataParallelStrategy, DDP2Strategy
from dstrat_ddp.data_parallel import join_outputs, replica_step

CPU = torch.device("cpu")


class Pair(NamedTuple):
    left: object
    right: object


@dataclasses.dataclass
class Output:
    loss: torch.Tensor
    name: str


@pytest.mark.on_cpu
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("training", [{}, {"accumulate": 2, "clip": 0.05}])
def test_dp_on_the_cpu_is_one_device(devices, training):
    strategy = DataParallelStrategy()
    start(strategy, Net(), parts(devices=devices))
    assert train(strategy, **training) == single_device_losses(Net(), **training)
    assert strategy.world_size == 1
    assert strategy.distributed_sampler_kwargs == {}


@pytest.mark.on_cpu
def test_several_cpu_devices_of_one_process_are_noted(caplog):
    strategy = DataParallelStrategy()
    with caplog.at_level("INFO", logger="dstrat_ddp"):
        start(strategy, Net(), parts(devices=3))
    assert caplog.messages == ["the 3 CPU devices of this process count as one: no batch is split"]


@pytest.mark.on_cpu  # torch's DataParallel copies between devices of CUDA alone
def test_dp_runs_every_step():
    class All(Net):
        def test_step(self, batch, batch_idx):
            return "tested", batch_idx

        def predict_step(self, batch, batch_idx):
            return self.layers(batch[0])

    strategy = DataParallelStrategy()
    start(strategy, All(), parts(devices=2), is_fitting=False)
    batch = next(batches())
    assert strategy.validation_step(batch, 0).ndim == 0
    assert strategy.test_step(batch, 7) == ("tested", 7)
    assert strategy.predict_step(batch, 0).shape == (8, 3)
    strategy.teardown()
    assert strategy.model is strategy.module


def test_dp_communicates_with_nobody():
    strategy = DataParallelStrategy(parallel_devices=[CPU])
    tensor = torch.arange(3.0)
    assert strategy.reduce(tensor) is tensor
    assert strategy.broadcast("anything") == "anything"
    assert strategy.barrier() is None
    assert strategy.all_gather(tensor).shape == (1, 3)
    assert strategy.is_global_zero
    assert strategy.root_device == CPU


def test_scalars_become_their_mean_and_other_tensors_are_joined():
    first = {"loss": torch.tensor(1.0, requires_grad=True), "guess": torch.zeros(2, 3), "count": torch.tensor(1)}
    second = {"loss": torch.tensor(2.0), "guess": torch.ones(1, 3), "count": torch.tensor(2)}
    output = join_outputs([first, second], CPU)
    assert float(output["loss"].detach()) == 1.5
    assert float(output["count"]) == 1.5
    assert output["guess"].tolist() == [[0, 0, 0], [0, 0, 0], [1, 1, 1]]
    output["loss"].backward()
    assert float(first["loss"].grad) == 0.5


@pytest.mark.parametrize("kind", [int, torch.tensor])
def test_losses_with_weights_become_their_weighted_mean(kind):
    losses = [torch.tensor(value, requires_grad=value == 1.0) for value in (1.0, 5.0, math.nan)]
    outputs = [{"loss": loss, "weight": kind(weight)} for loss, weight in zip(losses, (3, 1, 0), strict=True)]
    joined = join_outputs(outputs, CPU)
    assert (float(joined["loss"].detach()), float(joined["weight"])) == (2, 4)
    joined["loss"].backward()
    assert float(losses[0].grad) == 0.75


@pytest.mark.parametrize(
    ("outputs", "expected"),
    [
        ([1.0, 4.0], 2.5),
        ([None, None], None),
        (["a", "a"], "a"),
        ([3, 3], 3),
        ([(1.0, [2.0]), (3.0, [4.0])], (2.0, [3.0])),
        ([Pair(1.0, "x"), Pair(2.0, "x")], Pair(1.5, "x")),
        ([Output(torch.tensor(1.0), "x"), Output(torch.tensor(3.0), "x")], Output(torch.tensor(2.0), "x")),
    ],
)
def test_whatever_a_step_returns_is_joined(outputs, expected):
    assert join_outputs(outputs, CPU) == expected


def test_a_replica_runs_a_step_with_its_own_parameters():
    module, replica = Net(), Net()
    assert replica_step(replica, module.training_step) == replica.training_step
    assert replica_step(replica, join_outputs) is join_outputs


class Dice(CPUAccelerator):
    """Devices with random numbers of their own."""

    def __init__(self):
        super().__init__()
        self.thrown = [5, 7]

    def get_random_state(self, device):
        return torch.tensor([self.thrown[device.index]], dtype=torch.uint8)

    def set_random_state(self, device, state):
        self.thrown[device.index] = int(state)


@pytest.mark.parametrize("strategy", [DataParallelStrategy, DDP2Strategy])
def test_a_random_state_is_that_of_all_devices_of_the_process(strategy):
    dice = Dice()
    several = strategy(accelerator=dice, parallel_devices=[torch.device("cuda", index) for index in range(2)])
    of_both = several.get_random_state()
    dice.thrown = [0, 0]
    several.set_random_state(of_both)
    assert dice.thrown == [5, 7]
    several.set_random_state(torch.tensor([9], dtype=torch.uint8))  # of one device
    assert dice.thrown == [9, 7]


def ddp2_losses(cluster, **training):
    strategy = DDP2Strategy()
    start(strategy, Net(), dataclasses.replace(parts(cluster), parallel_devices=(CPU,)))
    losses = train(strategy, **training)
    validated = float(strategy.reduce(strategy.validation_step(share(strategy, next(batches())), 0)))
    places = strategy.world_size, strategy.root_device.type, strategy.device_ids, strategy.processes_per_machine
    strategy.teardown()
    return losses, validated, places


@pytest.mark.on_cpu  # torch's DataParallel copies between devices of CUDA alone
def test_ddp2_on_two_machines_gives_the_losses_of_one_device():
    cases = {"plain": {}, "accumulation and clipping": {"accumulate": 2, "clip": 0.05}}
    for found in in_ranks(each, function=ddp2_losses, cases=cases):
        for name, (losses, validated, places) in found.items():
            assert losses == pytest.approx(single_device_losses(Net(), **cases[name]), rel=1e-6)
            assert validated < losses[0]
            assert places == (2, "cpu", None, 1)


def test_ddp2_has_no_start_method_to_choose():
    with pytest.raises(MisuseError, match="start one per machine"):
        DDP2Strategy(start_method="spawn")
