"""``torch.simgpu``: what torch asks of the module of a type of device."""
# ruff: noqa: D103 - torch has documented them

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterable
    from contextlib import AbstractContextManager

native: Any = None
"""Compiled part, set when it is loaded."""

Event = torch.Event
Device = int | str | torch.device | None


def _index(device: Device = None) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return current_device() if index is None else index


def init() -> None:
    """Initialize the device in this process."""
    native.init()


_lazy_init = init


def is_available() -> bool:
    return device_count() > 0


def is_initialized() -> bool:
    return bool(native.is_initialized())


def _is_in_bad_fork() -> bool:
    return bool(native.is_in_bad_fork())


def is_bf16_supported() -> bool:
    return True


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16]


def get_device_name(device: Device = None) -> str:  # noqa: ARG001 - all are the same
    return "simulated GPU"


# The current device, and its streams


def device_count() -> int:
    return int(native.num_devices())


def current_device() -> int:
    return torch.accelerator.current_device_index()


def set_device(device: Device) -> None:
    torch.accelerator.set_device_index(_index(device))


class device:  # noqa: N801 - torch's name
    """Context in which a device is the current one."""

    def __init__(self, device: Device) -> None:
        self._index = _index(device)

    def __enter__(self) -> None:
        self._before = current_device()
        set_device(self._index)

    def __exit__(self, *error: object) -> None:
        set_device(self._before)


def Stream(device: Device = None, priority: int = 0) -> torch.Stream:  # noqa: N802 - torch's name
    return torch.Stream(device=torch.device("simgpu", _index(device)), priority=priority)


def stream(stream: torch.Stream) -> AbstractContextManager[Any]:
    return stream


def current_stream(device: Device = None) -> torch.Stream:
    return torch.accelerator.current_stream(_index(device))


def default_stream(device: Device = None) -> torch.Stream:
    in_use = current_stream(device)
    return torch.Stream(stream_id=0, device_index=in_use.device_index, device_type=in_use.device_type)


def set_stream(stream: torch.Stream) -> None:
    torch.accelerator.set_stream(stream)


def synchronize(device: Device = None) -> None:
    torch.accelerator.synchronize(_index(device))


# Memory


def memory_stats(device: Device = None) -> dict[str, int]:
    return dict(native.memory(_index(device)))


def memory_allocated(device: Device = None) -> int:
    return memory_stats(device)["in_use"]


def max_memory_allocated(device: Device = None) -> int:
    return memory_stats(device)["peak"]


memory_reserved, max_memory_reserved = memory_allocated, max_memory_allocated


def reset_peak_memory_stats(device: Device = None) -> None:
    native.reset_peak(_index(device))


def empty_cache() -> None:
    """Do nothing: freed memory goes back at once."""


# Random numbers


def get_rng_state(device: Device = None) -> Tensor:
    state: Tensor = native.default_generator(_index(device)).get_state()
    return state


def set_rng_state(new_state: Tensor, device: Device = None) -> None:
    native.default_generator(_index(device)).set_state(new_state)


def get_rng_state_all() -> list[Tensor]:
    return [get_rng_state(index) for index in range(device_count())]


def set_rng_state_all(new_states: Iterable[Tensor]) -> None:
    for index, state in enumerate(new_states):
        set_rng_state(state, index)


def manual_seed(seed: int) -> None:
    native.default_generator(current_device()).manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    for index in range(device_count()):
        native.default_generator(index).manual_seed(seed)


def initial_seed() -> int:
    return int(native.default_generator(current_device()).initial_seed())
