"""FairScale's FullyShardedDataParallel: the losses and the state of one device, on CPUs that stand for GPUs."""

import copy
import warnings

import pytest
import torch
from tests.hand_loop import BlockNet, losses_of, parts, single_device_losses, start, train
from tests.ranks import each, in_ranks
from tests.trainer_runs import Evaluated, Losses, Saves, loader, quiet_trainer

from dstrat import StrategyRegistry
from dstrat.builtin.single_device import SingleDeviceStrategy
from dstrat.errors import RequestError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("fairscale", reason="needs fairscale")
    from packages.fairscale.tests.streams_on_cpu import OnCPUs

# Layers of more elements than these are wrapped by themselves: none, the blocks' larger ones, all.
CASES = {
    "root only": {"options": {}},
    "some layers": {"options": {"min_num_params": 200}},
    "all layers": {"options": {"min_num_params": 1}},
    "not joined": {"options": {"min_num_params": 200, "flatten_parameters": False}},
}


def losses(cluster, options):
    return losses_of(OnCPUs(**options), BlockNet(), parts(cluster), steps=6)


def test_losses_are_those_of_one_device_whatever_is_wrapped():
    expected = single_device_losses(BlockNet(), steps=6)
    for found in in_ranks(each, 2, function=losses, cases=CASES):
        for case, of_case in found.items():
            assert of_case == pytest.approx(expected, rel=1e-6), case


def state(cluster, options):
    """Train, return the whole state, and go on with it in another run."""
    strategy = OnCPUs(**options)
    start(strategy, BlockNet(), parts(cluster))
    train(strategy, steps=3)
    whole = strategy.module_state_dict(), strategy.optimizer_state(strategy.optimizers[0])
    module, optimizer = copy.deepcopy(whole)  # counts of steps are the optimizer's own
    through = train(strategy, steps=3)
    strategy.teardown()
    again = OnCPUs(**options)
    start(again, BlockNet(), parts(cluster))
    again.load_module_state_dict(module)
    again.load_optimizer_state(again.optimizers[0], optimizer)
    resumed = train(again, steps=3)
    again.teardown()
    return module, optimizer, through, resumed


def test_the_whole_state_is_that_of_one_device_and_goes_on():
    one = SingleDeviceStrategy()
    start(one, BlockNet(), parts())
    train(one, steps=3)
    expected, weights = one.optimizer_state(one.optimizers[0]), one.module_state_dict()
    (found, other) = in_ranks(each, 2, function=state, cases=CASES)
    for case, (module, optimizer, through, resumed) in found.items():
        assert resumed == through == other[case][2], case
        assert module.keys() == weights.keys(), case
        names = [name for name, _ in BlockNet().named_parameters()]
        assert optimizer["param_groups"] == expected["param_groups"], case
        for number, entry in expected["state"].items():
            torch.testing.assert_close(dict(optimizer["state"][number]), dict(entry), msg=f"{case}: {names[number]}")


class Wide(Evaluated):
    def __init__(self):
        super().__init__()
        self.net = BlockNet()


def trained(cluster, folder, is_resumed):
    """Train for three steps, which are saved, or for the three after them."""
    recorder, ranks = Losses(), 1 if cluster is None else cluster.world_size
    if cluster is not None:  # in a rank
        StrategyRegistry.register("on_cpus", OnCPUs, facts={"device_types": ("cpu",)}, min_num_params=200)
    strategy = "single_device" if cluster is None else "on_cpus"
    callbacks = [recorder] if is_resumed else [recorder, Saves(folder, [3])]
    trainer = quiet_trainer(strategy, cluster, callbacks=callbacks, max_steps=6 if is_resumed else 3)
    trainer.fit(Wide(), loader(48, 8 // ranks), ckpt_path=folder / "3" if is_resumed else None)
    return recorder.losses


def test_checkpoints_move_to_one_device_and_back(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    losses = trained(None, one, is_resumed=False)
    expected = trained(None, one, is_resumed=True)
    for first in in_ranks(trained, 2, folder=two, is_resumed=False):
        assert first == pytest.approx(losses, rel=1e-6)
    assert trained(None, two, is_resumed=True) == pytest.approx(expected, rel=1e-6)
    for folder in (one, two):
        for found in in_ranks(trained, 2, folder=folder, is_resumed=True):
            assert found == pytest.approx(expected, rel=1e-6)


class Factored(Wide):
    def configure_optimizers(self):
        return torch.optim.Adafactor(self.parameters())


def error_of_whole_parameters(cluster):
    StrategyRegistry.register("on_cpus", OnCPUs, facts={"device_types": ("cpu",)}, min_num_params=200)
    try:
        quiet_trainer("on_cpus", cluster).fit(Factored(), loader(48, 4))
    except RequestError as error:
        return str(error)
    return None


def test_an_optimizer_of_whole_parameters_is_refused():
    for message in in_ranks(error_of_whole_parameters):
        assert "Adafactor needs whole parameters, and OnCPUs lets each rank step flat pieces" in message
