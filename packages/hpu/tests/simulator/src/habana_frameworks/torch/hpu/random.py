"""Random numbers of the device, which have a state of their own."""

import torch

from habana_frameworks.torch._device import simulator

default_generators = [simulator.default_generator()]


def _check(device) -> None:
    index = device if isinstance(device, int) else torch.device(device).index
    if index not in (None, 0):
        raise RuntimeError("hpu get_rng_state supports only device 0")


def get_rng_state(device="hpu"):
    _check(device)
    return default_generators[0].get_state()


def set_rng_state(new_state, device="hpu"):
    _check(device)
    default_generators[0].set_state(new_state)


def get_rng_state_all():
    return [get_rng_state(0)]


def set_rng_state_all(new_states):
    if len(new_states) != 1:
        raise RuntimeError("hpu set_rng_state_all supports only states len of 1")
    set_rng_state(new_states[0], 0)


def manual_seed(seed):
    return default_generators[0].manual_seed(int(seed))


def manual_seed_all(seed):
    manual_seed(seed)


def seed():
    return default_generators[0].seed()


def initial_seed():
    return default_generators[0].initial_seed()
