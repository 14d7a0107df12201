"""Tied parameters of a module that moves between devices."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.nn import Module, Parameter


@contextmanager
def keep_ties(module: Module) -> Iterator[None]:
    """Keep parameters tied that several layers share, while the module moves to another device.

    On CUDA, XPU and MPS torch moves a parameter in place.  To XLA, and to devices that a package adds, each layer gets
    a new one.
    """
    users: dict[Parameter, list[tuple[Module, str]]] = {}
    for layer in module.modules():
        for name, parameter in layer.named_parameters(recurse=False):  # a parameter hashes by identity
            users.setdefault(parameter, []).append((layer, name))
    yield
    for (first, first_name), *tied in users.values():
        for layer, name in tied:
            layer.register_parameter(name, getattr(first, first_name))
