"""Methods and classes that were renamed: packages may call and override them by either name."""

import pytest
import torch

import dstrat
from dstrat.builtin.accelerators.cpu import CPUAccelerator
from dstrat.interfaces.strategy import Components, Parts
from dstrat.parallel import collectives
from dstrat.parallel.strategy import ParallelStrategy


class ByFirstName(ParallelStrategy):
    def __init__(self):
        super().__init__()
        self.calls = []

    def receive(self, parts):
        super().receive(parts)
        self.calls.append(("ByFirstName", self.parts.accelerator is parts.accelerator))

    def take_from_first_rank(self, tensors):
        self.calls.append("tensors")


class ByName(ByFirstName):
    def set_components(self, components):
        super().set_components(components)
        self.calls.append(("ByName", self.parts.accelerator is components.accelerator))


class ByFirstNameAgain(ByName):
    def receive(self, parts):
        super().receive(parts)
        self.calls.append(("ByFirstNameAgain", self.parts.accelerator is parts.accelerator))


@pytest.mark.parametrize("name", ["set_components", "receive"])
def test_overrides_by_either_name_are_called_once_each_from_the_base_up(name):
    strategy = ByFirstNameAgain()
    getattr(strategy, name)(Components(accelerator=CPUAccelerator()))
    assert strategy.calls == [("ByFirstName", True), ("ByName", True), ("ByFirstNameAgain", True)]


def test_tensors_are_broadcast_by_an_override_of_either_name():
    strategy = ByName()
    strategy.set_components(Components(accelerator=CPUAccelerator(), parallel_devices=(torch.device("cpu"),)))
    strategy.connect(torch.nn.Linear(1, 1))
    strategy.calls.clear()
    strategy.broadcast_tensors([])
    strategy.take_from_first_rank([])
    strategy.wrap_model(None)  # which broadcasts the parameters
    assert strategy.calls == ["tensors"] * 3


def test_components_are_read_and_set_by_their_first_names():
    strategy, components = ByName(), Components(accelerator=CPUAccelerator())
    assert strategy.given_parts is strategy.constructor_components
    strategy.parts = components
    assert strategy.parts is strategy.components is components


def test_first_names_can_be_imported():
    assert Parts is Components
    assert dstrat.take_from_first_rank is dstrat.broadcast_tensors is collectives.take_from_first_rank
