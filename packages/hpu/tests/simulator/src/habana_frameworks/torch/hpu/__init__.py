"""The device of this process, its memory, streams and random numbers."""

import os
import time

import torch

from habana_frameworks.torch import _device
from habana_frameworks.torch.hpu import random
from habana_frameworks.torch.hpu.graphs import HPUGraph, ModuleCacher, graph, make_graphed_callables
from habana_frameworks.torch.hpu.random import (
    get_rng_state,
    get_rng_state_all,
    initial_seed,
    manual_seed,
    manual_seed_all,
    seed,
    set_rng_state,
    set_rng_state_all,
)

__all__ = [
    "Event",
    "HPUGraph",
    "ModuleCacher",
    "Stream",
    "current_device",
    "current_stream",
    "default_stream",
    "device",
    "device_count",
    "get_device_name",
    "get_rng_state",
    "get_rng_state_all",
    "graph",
    "init",
    "initial_seed",
    "is_available",
    "is_bf16_supported",
    "is_initialized",
    "make_graphed_callables",
    "manual_seed",
    "manual_seed_all",
    "max_memory_allocated",
    "memory_allocated",
    "memory_stats",
    "random",
    "reset_peak_memory_stats",
    "seed",
    "set_device",
    "set_rng_state",
    "set_rng_state_all",
    "set_stream",
    "stream",
    "synchronize",
]

HABANA_VISIBLE_MODULES_VAR = "HABANA_VISIBLE_MODULES"
HLS_MODULE_ID_VAR = "HLS_MODULE_ID"
MEMORY = 96 * 2**30  # bytes of a Gaudi 2


def init() -> None:
    _device.configure()
    _device.simulator.acquire()


_lazy_init = init  # torch calls it before it makes the first tensor


def is_initialized() -> bool:
    return _device.simulator.module_id() >= 0


def is_available() -> bool:
    return device_count() > 0


def device_count() -> int:
    visible = os.environ.get(HABANA_VISIBLE_MODULES_VAR)
    return min(_device.num_devices(), len(visible.split(","))) if visible else _device.num_devices()


def is_bf16_supported() -> bool:
    return is_available()


def current_device() -> int:
    init()
    return 0


def get_device_name(device=None) -> str:
    init()
    return "GAUDI2 (simulator)"


def synchronize(device=None) -> None:
    init()
    _device.simulator.mark_step()


def set_device(device) -> None:
    """Choose the module of this process, before it acquires one."""
    index = device if isinstance(device, int) else torch.device(device or "hpu").index or 0
    visible = os.environ.get(HABANA_VISIBLE_MODULES_VAR) or "0,1,2,3,4,5,6,7"
    modules = [int(module) for module in visible.split(",")]
    current = int(os.environ.get(HLS_MODULE_ID_VAR, "-1"))
    if current >= 0:
        index = modules.index(current)
        assert modules[index] == current
    if current == -1 and HABANA_VISIBLE_MODULES_VAR not in os.environ and device_count() < 8:
        assert index == 0, f"As {HABANA_VISIBLE_MODULES_VAR} is not provided, the only supported device idx is 0."
    else:
        os.environ[HLS_MODULE_ID_VAR] = str(modules[index])
    set_device.current = index


set_device.current = -1


class device:
    """A context in which a device is the current one: there is only one."""

    def __init__(self, device):
        index = device if isinstance(device, int) else torch.device(device).index
        self.module = int(os.environ.get(HLS_MODULE_ID_VAR, "-1"))
        if index not in (None, 0, self.module):
            raise AssertionError(f"Requested device_id={index} is different from env_device_id={self.module}")

    def __enter__(self):
        self.before = set_device.current
        if self.module not in (-1, self.before):
            set_device(self.module)

    def __exit__(self, *error):
        if self.before not in (-1, self.module):
            set_device(self.module)  # which writes the last module where the environment names none
        return False


# Memory


def memory_stats(device=None) -> dict[str, int]:
    init()
    counted = _device.simulator.counters()
    return {
        "Limit": MEMORY,
        "InUse": counted["in_use"],
        "MaxInUse": counted["max_in_use"],
        "NumAllocs": counted["allocations"],
        "NumFrees": counted["frees"],
        "ActiveAllocs": counted["allocations"] - counted["frees"],
        "MaxAllocSize": 0,
        "TotalSystemAllocs": counted["allocations"],
        "TotalSystemFrees": counted["frees"],
        "TotalActiveAllocs": counted["allocations"] - counted["frees"],
    }


def memory_allocated(device=None) -> int:
    return memory_stats(device)["InUse"]


def max_memory_allocated(device=None) -> int:
    return memory_stats(device)["MaxInUse"]


def reset_peak_memory_stats(device=None) -> None:
    init()
    _device.simulator.reset_peak()


# Streams: there is one, and everything is done when a call returns


class Stream:
    def __init__(self, device=None, priority=0, provided_stream=None):
        init()
        self.device = torch.device("hpu", 0)

    def __eq__(self, other):
        return isinstance(other, Stream)

    def __hash__(self):
        return 0

    def query(self):
        return True

    def synchronize(self):
        pass

    def record_event(self, event=None):
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event):
        pass

    def wait_stream(self, stream):
        pass


class Event(torch.Event):
    """An event of torch, which its streams read without looking at the type; never recorded, nobody waits for it."""

    def __new__(cls, enable_timing=False):
        return super().__new__(cls, device="hpu", enable_timing=enable_timing)

    def __init__(self, enable_timing=False):
        self.time = None

    def record(self, stream=None):
        self.time = time.perf_counter()

    def wait(self, stream=None):
        pass

    def query(self):
        return True

    def synchronize(self):
        pass

    def elapsed_time(self, end):
        return 1000 * (end.time - self.time)


class StreamContext:
    def __init__(self, stream):
        self.stream = stream

    def __enter__(self):
        return self.stream

    def __exit__(self, *error):
        return None


def stream(stream):
    return StreamContext(stream)


def set_stream(stream):
    pass


def current_stream(device=None):
    return Stream()


def default_stream(device=None):
    return Stream()
