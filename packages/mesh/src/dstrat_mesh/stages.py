"""Stages of a module: consecutive layers, of which a rank allocates its own only."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dstrat.errors import MisuseError, RequestError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.nn import Module

    from dstrat.interfaces.pipeline import Pipeline


@dataclass(frozen=True, kw_only=True, slots=True)
class Stages:
    """Assignment of a pipeline's layers to stages.

    Attributes:
        layers: The layers of each stage, in order.
        names: Their names in the module.
    """

    layers: list[list[Module]]
    names: list[list[str]]

    @classmethod
    def of(cls, module: Module, pipeline: Pipeline, count: int) -> Stages:
        """Divide a pipeline into stages of about as many parameters.

        Raises:
            RequestError: There are fewer layers than stages.
            MisuseError: The layers are not the module's, or share parameters.
        """
        chain, known = pipeline.chain, {id(layer): name for name, layer in module.named_modules()}
        names = []
        for layer in chain:
            if id(layer) not in known:
                raise MisuseError(
                    f"the pipeline has a {type(layer).__name__} that is no layer of {type(module).__name__}"
                )
            names.append(known[id(layer)])
        bounds = _bounds([sum(parameter.numel() for parameter in layer.parameters()) for layer in chain], count)
        stages = cls(
            layers=[chain[a:b] for a, b in itertools.pairwise(bounds)],
            names=[names[a:b] for a, b in itertools.pairwise(bounds)],
        )
        stages._check(module)
        return stages

    def _check(self, module: Module) -> None:
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        owners: dict[int, int] = {}
        for index, layers in enumerate(self.layers):
            if not any(True for layer in layers for _ in layer.parameters()):
                raise MisuseError(
                    f"stage {index} of the pipeline ({', '.join(self.names[index])}) has no parameters: give fewer "
                    "stages"
                )
            for layer in layers:
                for parameter in layer.parameters():
                    if owners.setdefault(id(parameter), index) != index:
                        raise MisuseError(
                            f"the parameter {names[id(parameter)]!r} is in stages {owners[id(parameter)]} and {index} "
                            "of the pipeline, which would train it separately: untie it, or leave pp out"
                        )
        if outside := [name for key, name in names.items() if key not in owners]:
            raise MisuseError(
                f"the pipeline has no layer with the parameter {outside[0]!r} of {type(module).__name__}: add its layer"
            )

    def skeleton(self, index: int) -> Module:
        """Return a module with the layers of a stage only, under the names that they have in the module."""
        root = nn.Module()
        for layer, name in zip(self.layers[index], self.names[index], strict=True):
            *path, last = name.split(".")
            parent = root
            for name_of_child in path:
                if name_of_child not in parent._modules:  # noqa: SLF001 - a plain container, which has nothing else
                    parent.add_module(name_of_child, nn.Module())
                parent = parent.get_submodule(name_of_child)
            parent.add_module(last, layer)
        return root

    def other_layers(self, index: int) -> set[Module]:
        """Return all modules within the layers of other stages."""
        return {
            inner
            for other, layers in enumerate(self.layers)
            if other != index
            for layer in layers
            for inner in layer.modules()
        }


def free_parameters(modules: set[Module]) -> None:
    """Move the parameters of modules to the meta device, where they keep names and shapes only."""
    for module in modules:
        parameters: list[tuple[str, Any]] = list(module.named_parameters(recurse=False))
        for name, parameter in parameters:
            empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
            setattr(module, name, nn.Parameter(empty, parameter.requires_grad))


def _bounds(sizes: Sequence[int], count: int) -> list[int]:
    """Return the index of each stage's first layer, and the number of layers."""
    if len(sizes) < count:
        raise RequestError(f"the pipeline has {len(sizes)} layers, and pp={count} needs a layer for each stage")
    total, passed, stages = sum(sizes), 0, []
    for size in sizes:
        stages.append(min(count - 1, int(count * (passed + size / 2) / max(total, 1))))
        passed += size
    if set(stages) != set(range(count)):  # a very large layer leaves a stage without one
        stages = [position * count // len(sizes) for position in range(len(sizes))]
    return [*(stages.index(stage) for stage in range(count)), len(sizes)]
