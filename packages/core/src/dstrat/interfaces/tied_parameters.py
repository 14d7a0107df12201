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
    """Keep the parameters the same objects, also those that layers share, while the module moves to a device.

    On CUDA, XPU and MPS torch moves a parameter in place.  On other devices each layer gets a new one, without the
    hooks and the class of the old one: optimizers that the program made before would train the old ones, and those of
    a run have no state of the new ones after it.
    """
    users = _users_of_parameters(module)
    try:
        yield
    finally:  # also where memory was short, and a part of the layers has moved
        for parameter, layers in users.items():
            first, first_name = layers[0]
            moved = getattr(first, first_name)
            if moved is not parameter:
                _take_tensor(parameter, moved)
            for layer, name in layers:
                if getattr(layer, name) is not parameter:
                    setattr(layer, name, parameter)  # an RNN then computes with it too


def _take_tensor(parameter: Parameter, moved: Parameter) -> None:
    """Give a parameter the tensor and gradient of another one; its class, attributes and hooks stay."""
    import torch

    # torch.utils.swap_tensors swaps classes and attributes too.  It refuses parameters with weak references, such as
    # those of an RNN, and in graphs, such as those that a program keeps with a loss.
    torch._C._swap_tensor_impl(parameter, moved)  # noqa: SLF001 - what swap_tensors calls, in torch 2.9 to 2.13
    for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        setattr(parameter, hooks, getattr(parameter, hooks))  # enters them in the new tensor


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
