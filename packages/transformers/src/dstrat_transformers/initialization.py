"""First values of a model that a strategy makes without memory, one layer at a time."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dstrat.errors import MisuseError
from dstrat.parallel.meta_device import parameters_on_meta
from dstrat_transformers.models import (
    initialize_layer,
    is_constructor,
    is_peft,
    is_pretrained_model,
    owners_of_parameters,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor
    from torch.nn import Module, Parameter


def make_model(factory: Callable[[], Module]) -> Module:
    """Return the model of a function, with the same first values on every strategy.

    Where the strategy makes parameters without memory, each layer gets its values when it is sharded.

    Args:
        factory: Returns a new model.

    Raises:
        MisuseError: The function does not return a module, or parameters without memory would lose values that it has
            loaded.
    """
    # Before the function: constructors of layers with memory draw random numbers too, which then count for nothing.
    seed = int(torch.randint(2**31, ()))
    # Only where no values can be lost: another function may load some.
    function = factory.func if isinstance(factory, partial) else factory
    with parameters_on_meta() if is_constructor(function) and shards_new_layers() else nullcontext():
        model = factory()
    if not isinstance(model, nn.Module):
        raise MisuseError(f"the function for the model returned a {type(model).__name__}: return a model")
    is_on_meta = any(parameter.is_meta for layer in model.modules() for parameter in direct_parameters(layer).values())
    # from_pretrained leaves a model in evaluation mode, and constructors in training mode.
    has_values = is_peft(model) or not model.training
    if has_values and is_on_meta:
        raise MisuseError(
            f"the values that the function for {type(model).__name__} has loaded are lost where parameters are made "
            "sharded: pass the model itself to HFModule, or functools.partial(SomeModel.from_pretrained, name)"
        )
    if is_pretrained_model(model) and not has_values:
        initialize(model, seed)
    return model


def shards_new_layers() -> bool:
    """Return whether the strategy shards layers as soon as they are made, or makes them without memory."""
    parameter = direct_parameters(nn.LayerNorm(1))["weight"]  # which draws no random numbers
    return parameter.is_meta or hasattr(parameter, "ds_id")  # set by DeepSpeed's zero.Init, on meta or not


def direct_parameters(layer: Module) -> dict[str, Any]:
    """Return a layer's own parameters by name, without those of its children."""
    # Not by a look-up: in it DeepSpeed's strategy gathers a parameter until the model is made.
    return {name: value for name, value in dict.items(layer._parameters) if value is not None}  # noqa: SLF001


def initialize(model: Module, seed: int) -> None:
    """Give a model its first values: now, or when a strategy shards the layers that have no memory yet.

    The values are those of the model's ``_init_weights``.  Each layer draws from a seed of its own, so that they are
    the same whenever and in whichever order layers are asked for.

    Args:
        model: A PreTrainedModel.
        seed: Determines the values.
    """
    first_values = FirstValues(model, seed)
    for layer in model.modules():
        if any(parameter.is_meta for parameter in direct_parameters(layer).values()):
            layer.reset_parameters = partial(first_values.fill, layer)  # type: ignore[assignment]  # strategies call it
        elif direct_parameters(layer):
            first_values.fill(layer)


class FirstValues:
    """The first values of a model, which are computed for one layer at a time.

    They are computed in the memory of the layer's own parameters, if these are whole and on the CPU: a strategy that
    shards one layer after the other then never holds the values of a layer twice.

    Args:
        model: A PreTrainedModel.
        seed: Determines the values.
    """

    def __init__(self, model: Module, seed: int) -> None:
        skeleton = _skeleton(model)
        self._copies = dict(zip(map(id, model.modules()), skeleton.modules(), strict=True))
        self._paths = {id(path[-1]): path for path in _paths(skeleton)}
        self._owners = owners_of_parameters(skeleton)
        # A shared parameter gets its value in the first layer that has it.
        self._homes = {(id(layer), name): owners[0][0] for owners in self._owners.values() for layer, name in owners}
        homes = {id(home): home for home in self._homes.values()}
        self._seeds = {home: seed + number for number, home in enumerate(homes)}

    def fill(self, layer: Module) -> None:
        """Give the parameters of a layer of the model their values."""
        twin = self._copies[id(layer)]
        names_by_home: dict[Module, list[str]] = {}
        for name in direct_parameters(twin):
            names_by_home.setdefault(self._homes[id(twin), name], []).append(name)
        for home, names in names_by_home.items():
            self._compute(home, direct_parameters(layer) if home is twin else {})
            for name in names:
                assign(layer, name, getattr(twin, name))
            self._move(home, "meta")

    def _compute(self, layer: Module, memory: Mapping[str, Parameter]) -> None:
        """Compute the values of the skeleton's layer, in the memory of other parameters where they are alike."""
        self._move(layer, "cpu", memory)
        path = self._paths[id(layer)]
        # The values are computed on the CPU, and the training's random numbers must not depend on the strategy.
        with torch.no_grad(), torch.random.fork_rng(devices=()):
            torch.manual_seed(self._seeds[id(layer)])
            for length in range(len(path), 0, -1):
                # A model may change parameters of the layers inside; what is on meta draws no random numbers.
                initialize_layer(_pretrained_model(path[:length]), path[length - 1])

    def _move(self, layer: Module, device: str, memory: Mapping[str, Parameter] | None = None) -> None:
        """Replace the parameters of the skeleton's layer by empty ones on a device, or by others' memory."""
        for name, parameter in list(layer.named_parameters(recurse=False)):
            values: Tensor | None = (memory or {}).get(name)
            if values is None or not _is_like(values, parameter):
                values = torch.empty_like(parameter, device=device)
            moved = nn.Parameter(values.detach(), parameter.requires_grad)
            owners = self._owners.pop(id(parameter))
            self._owners[id(moved)] = owners
            for owner, name_in_owner in owners:
                owner.register_parameter(name_in_owner, moved)


def _is_like(values: Tensor, parameter: Parameter) -> bool:
    """Return whether values are a whole tensor on the CPU, of the shape and dtype of a parameter."""
    is_plain = type(values) in (torch.Tensor, nn.Parameter) and values.device.type == "cpu"
    return is_plain and values.shape == parameter.shape and values.dtype == parameter.dtype


@torch.no_grad()
def assign(layer: Module, name: str, value: Tensor) -> None:
    """Copy a value, which is the same on all ranks, into a parameter of a layer; collective where that is sharded."""
    parameter = direct_parameters(layer)[name]
    # ZeRO stage 3 of DeepSpeed: the parameter is empty, and its class has the methods to gather and shard it.
    if getattr(getattr(parameter, "ds_status", None), "name", "") == "NOT_AVAILABLE":
        parameter.all_gather(param_list=[parameter])
        parameter.data.copy_(value)
        parameter.partition(param_list=[parameter], has_been_updated=True)
    elif parameter.data_ptr() != value.data_ptr():  # it may be computed in place
        parameter.data.copy_(value)


def names_of_parameters(model: Module) -> dict[tuple[int, str], tuple[list[str], torch.Size]]:
    """Return the names in the state dict of each layer's parameters, shared ones with all of theirs, and the shape."""
    skeleton = _skeleton(model)
    layers = dict(zip(map(id, skeleton.modules()), model.modules(), strict=True))
    prefixes = {id(layer): f"{path}." if path else "" for path, layer in skeleton.named_modules()}
    names: dict[tuple[int, str], tuple[list[str], torch.Size]] = {}
    for owners in owners_of_parameters(skeleton).values():
        aliases = [prefixes[id(layer)] + name for layer, name in owners]
        for layer, name in owners:
            names[id(layers[id(layer)]), name] = aliases, getattr(layer, name).shape
    return names


Path = tuple[nn.Module, ...]


def _skeleton(model: Module) -> Module:
    """Return a copy of a model with its layers, buffers and shared parameters, but without values."""
    # By the dicts: under ZeRO stage 3 each look-up of a parameter would gather it.
    parameters = {layer: layer._parameters for layer in model.modules()}  # noqa: SLF001
    copies: dict[int, Parameter] = {}

    def without_values(parameter: Any) -> Any:
        if parameter is not None and id(parameter) not in copies:
            shape = getattr(parameter, "ds_shape", parameter.shape)  # of a parameter that DeepSpeed has sharded
            empty = torch.empty(shape, dtype=parameter.dtype, device="meta")
            copies[id(parameter)] = nn.Parameter(empty, parameter.requires_grad)
        return None if parameter is None else copies[id(parameter)]

    try:
        for layer, named in parameters.items():
            layer._parameters = {name: without_values(value) for name, value in dict.items(named)}  # noqa: SLF001
        return copy.deepcopy(model)  # which copies buffers with their values, and keeps shared parameters shared
    finally:
        for layer, named in parameters.items():
            layer._parameters = named  # noqa: SLF001 - as above


def _paths(module: Module, outer: Path = ()) -> Iterator[Path]:
    """Yield each layer with all that contain it, outermost first."""
    path = (*outer, module)
    yield path
    for child in module.children():
        yield from _paths(child, path)


def _pretrained_model(path: Path) -> Any:
    """Return the innermost PreTrainedModel on the way to a layer."""
    return next(module for module in reversed(path) if is_pretrained_model(module))
