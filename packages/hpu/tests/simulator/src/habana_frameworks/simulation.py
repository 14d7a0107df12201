"""Counters, which only the simulator has."""

from habana_frameworks.torch import _device


def counters() -> dict[str, int]:
    """Return what was counted in this process.

    ``graphs`` that ran, those ``compiled`` for them, copies ``to_host`` and ``to_device``, ``operations``, and those
    that are ``pending`` for the next graph; bytes ``in_use`` and ``max_in_use``.
    """
    return dict(_device.simulator.counters())


def module_id() -> int:
    """Return the module that this process holds; -1 where it holds none."""
    return _device.simulator.module_id()
