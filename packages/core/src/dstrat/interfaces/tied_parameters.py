"""Tied parameters of a module that moves between devices, or is split."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from dstrat.errors import MisuseError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.nn import Module, Parameter


@contextmanager
def keep_ties(module: Module) -> Iterator[None]:
    """Keep parameters tied that several layers share, while the module moves to another device.

    On CUDA, XPU and MPS torch moves a parameter in place.  On other devices each layer gets a new one.
    """
    users = _users_of_parameters(module)
    yield
    for (first, first_name), *tied in users.values():
        for layer, name in tied:
            layer.register_parameter(name, getattr(first, first_name))


@contextmanager
def checked_ties(module: Module) -> Iterator[None]:
    """Check that parameters which several layers share are still shared, after the layers were split or sharded.

    ``parallelize_module`` and ``fully_shard`` give each layer a parameter of its own.

    Raises:
        MisuseError: Some are not.
    """
    users = _users_of_parameters(module)
    yield
    names = {layer: name for name, layer in module.named_modules()}
    for sharing in users.values():
        present = [(layer, name) for layer, name in sharing if layer in names and name in layer._parameters]  # noqa: SLF001 - a module may have another attribute of that name
        parameters = [getattr(layer, name) for layer, name in present]
        if len(set(parameters)) > 1 and any(hasattr(parameter, "device_mesh") for parameter in parameters):
            (first, second, *_) = (f"{names[layer]}.{name}".lstrip(".") for layer, name in present)
            raise MisuseError(
                f"configure_model of {type(module).__name__} has split layers that share a parameter, so that "
                f"{first!r} and {second!r} are trained apart: let them share it again after parallelize_module, "
                f"self.{second} = self.{first}, or call fully_shard for a layer that contains both"
            )


def _users_of_parameters(module: Module) -> dict[Parameter, list[tuple[Module, str]]]:
    """Return the layers that have each parameter, with its names in them."""
    users: dict[Parameter, list[tuple[Module, str]]] = {}
    for layer in module.modules():
        for name, parameter in layer.named_parameters(recurse=False):  # a parameter hashes by identity
            users.setdefault(parameter, []).append((layer, name))
    return users
