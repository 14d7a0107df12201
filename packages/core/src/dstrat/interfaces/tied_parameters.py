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
    """Keep the parameters the same objects, and those tied that layers share, while the module moves to a device.

    On CUDA, XPU and MPS torch moves a parameter in place.  On other devices each layer gets a new one: optimizers that
    the program made before would train the old ones, and those of a run have no state of the new ones after it.
    """
    users = _users_of_parameters(module)
    yield
    for parameter, layers in users.items():
        first, first_name = layers[0]
        moved = getattr(first, first_name)
        result = parameter if moved is parameter or _take_value(parameter, moved) else moved
        for layer, name in layers:
            if getattr(layer, name) is not result:
                layer.register_parameter(name, result)


def _take_value(parameter: Parameter, moved: Parameter) -> bool:
    """Give a parameter the value and gradient of another one; return False if something else has its old value."""
    from torch.utils import swap_tensors

    try:
        swap_tensors(parameter, moved)
    except RuntimeError:
        return False
    parameter.__dict__.update(moved.__dict__)  # attributes, which have been swapped too
    return True


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
        for name, parameter in layer._parameters.items():  # noqa: SLF001 - named_parameters gives each of a layer once
            if parameter is not None:
                users.setdefault(parameter, []).append((layer, name))  # a parameter hashes by identity
    return users
