"""Fragments of the outer optimizer, where parameters are unfrozen while others are in flight."""

import torch
from torch import nn

from dstrat_diloco.outer import OuterOptimizer, OuterSettings

ONE_FRAGMENT = OuterSettings(every=4, lr=1.0, momentum=0.0, fragments=1, delay=3, mixing=0.5, delta_dtype=None)
SETTINGS = OuterSettings(every=4, lr=1.0, momentum=0.0, fragments=2, delay=3, mixing=0.5, delta_dtype=None)


class OwnDeltas:
    """The mean over a single group."""

    def __init__(self, deltas):
        self.deltas = deltas

    def advance(self):
        pass

    def wait(self):
        return self.deltas


class Recorded:
    """An outer optimizer, and after which steps how many elements were sent."""

    def __init__(self):
        self.sent = []
        self.outer = OuterOptimizer(SETTINGS, self.begin_average)
        self.parameters = {"first": nn.Parameter(torch.zeros(10)), "second": nn.Parameter(torch.zeros(20))}
        self.parameters["second"].requires_grad_(False)
        self.outer.add_parameters(self.parameters)

    def begin_average(self, deltas, dtype):
        self.sent.append((self.outer.steps, deltas.numel()))
        return OwnDeltas(deltas.clone())

    def step(self):
        with torch.no_grad():
            for parameter in self.parameters.values():
                if parameter.requires_grad:
                    parameter.add_(1)
        self.outer.after_step()

    def unfreeze(self):
        self.parameters["second"].requires_grad_(True)
        self.outer.add_parameters(self.parameters)


def test_a_parameter_keeps_its_fragment_when_another_is_unfrozen():
    recorded = Recorded()
    for _ in range(5):
        recorded.step()
    recorded.unfreeze()  # while the first one is in flight, until step 7
    for _ in range(3):
        recorded.step()
    assert recorded.sent == [(4, 10), (8, 30)]


def test_a_resume_has_the_fragments_of_before():
    recorded = Recorded()
    for _ in range(8):
        recorded.step()
    recorded.unfreeze()
    state = recorded.outer.state_dict()
    again = Recorded()
    again.parameters["second"].requires_grad_(True)
    again.outer = OuterOptimizer(SETTINGS, again.begin_average)
    again.outer.load_state_dict(state, again.parameters)
    for each in (recorded, again):
        each.sent.clear()
        for _ in range(4):
            each.step()
    assert again.sent == recorded.sent


def test_what_is_in_flight_is_not_sent_twice_after_a_resume_with_other_fragments():
    recorded = Recorded()
    recorded.parameters["second"].requires_grad_(True)
    recorded.outer = OuterOptimizer(SETTINGS, recorded.begin_average)
    recorded.outer.add_parameters(recorded.parameters)
    for _ in range(7):
        recorded.step()
    assert recorded.sent == [(2, 10), (4, 20), (6, 10)]  # the last one is in flight until step 9
    again = Recorded()
    again.parameters["second"].requires_grad_(True)
    again.outer = OuterOptimizer(ONE_FRAGMENT, again.begin_average)
    again.outer.load_state_dict(recorded.outer.state_dict(), again.parameters)
    for _ in range(5):
        again.step()
    assert again.sent == [(8, 20), (12, 30)]
