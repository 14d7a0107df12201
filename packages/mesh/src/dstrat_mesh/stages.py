"""Stages of a module: consecutive layers, of which a rank allocates its own only."""

from __future__ import annotations

import itertools
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dstrat.errors import MisuseError, RequestError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor
    from torch.nn import Module
    from typing_extensions import Self

    from dstrat.interfaces.pipeline import Pipeline
    from dstrat.interfaces.strategy import Strategy


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedParameter:
    """A parameter of stages on several ranks, such as the weight of an embedding and an output layer.

    Attributes:
        owners: The layers that have it, by their names in the module; they have no other parameters.
        attribute: Its name in these layers.
        positions: The positions of the ranks whose stages have it, in order.
    """

    owners: dict[str, Module]
    attribute: str
    positions: tuple[int, ...]

    @property
    def parameter(self) -> Any:
        """The parameter as it is now, in a rank that has it."""
        return getattr(next(iter(self.owners.values())), self.attribute)


@dataclass(frozen=True, kw_only=True, slots=True)
class Stages:
    """Assignment of a pipeline's layers to stages, and of stages to ranks: stage ``s`` is at position ``s % ranks``.

    Attributes:
        ranks: Number of ranks.
        layers: The layers of each stage, in order.
        names: Their names in the module.
        shared: The parameters of stages on several ranks.
    """

    ranks: int
    layers: list[list[Module]]
    names: list[list[str]]
    shared: list[SharedParameter]

    @classmethod
    def of(cls, module: Module, pipeline: Pipeline, ranks: int, stages_per_rank: int) -> Stages:
        """Divide a pipeline into stages of about as many parameters.

        Raises:
            RequestError: There are fewer layers than stages.
            MisuseError: The layers are not the module's, lack a parameter, or share one that cannot be in two stages.
        """
        chain, known = pipeline.chain, {id(layer): name for name, layer in module.named_modules()}
        names = []
        for layer in chain:
            if id(layer) not in known:
                raise MisuseError(
                    f"the pipeline has a {type(layer).__name__} that is no layer of {type(module).__name__}"
                )
            names.append(known[id(layer)])
        bounds = _bounds(
            [sum(parameter.numel() for parameter in layer.parameters()) for layer in chain], ranks * stages_per_rank
        )
        layers = [chain[a:b] for a, b in itertools.pairwise(bounds)]
        names_of_stages = [names[a:b] for a, b in itertools.pairwise(bounds)]
        for index, of_stage in enumerate(layers):
            if not any(True for layer in of_stage for _ in layer.parameters()):
                raise MisuseError(
                    f"stage {index} of the pipeline ({', '.join(names_of_stages[index])}) has no parameters: give "
                    "fewer stages"
                )
        shared = _shared_parameters(module, layers, ranks)
        return cls(ranks=ranks, layers=layers, names=names_of_stages, shared=shared)

    def layers_at(self, position: int) -> list[list[Module]]:
        """Return the layers of each stage of a rank."""
        return self.layers[position :: self.ranks]

    def skeleton(self, position: int) -> Module:
        """Return a module with the layers of a rank's stages only, under the names that they have in the module.

        Layers of other stages that share a parameter with it are in it too, so that the parameter stays shared.
        """
        names = itertools.chain.from_iterable(self.names[position :: self.ranks])
        layers = dict(zip(names, itertools.chain.from_iterable(self.layers_at(position)), strict=True))
        inside = {id(inner) for layer in layers.values() for inner in layer.modules()}
        for shared in self.shared:
            if position in shared.positions:
                layers |= {name: owner for name, owner in shared.owners.items() if id(owner) not in inside}
        root = nn.Module()
        for name, layer in layers.items():
            *path, last = name.split(".")
            parent = root
            for name_of_child in path:
                if name_of_child not in parent._modules:  # noqa: SLF001 - a plain container, which has nothing else
                    parent.add_module(name_of_child, nn.Module())
                parent = parent.get_submodule(name_of_child)
            parent.add_module(last, layer)
        return root

    def other_layers(self, position: int) -> set[Module]:
        """Return all modules within the layers of other ranks, but for those of a rank's own parameters."""
        layers = itertools.chain.from_iterable(self.layers_at(position))
        present = {inner for layer in layers for inner in layer.modules()}
        for shared in self.shared:
            if position in shared.positions:
                present |= set(shared.owners.values())
        every = {inner for layers in self.layers for layer in layers for inner in layer.modules()}
        return every - present


def _shared_parameters(module: Module, layers: Sequence[Sequence[Module]], ranks: int) -> list[SharedParameter]:
    """Return the parameters of stages on several ranks.

    Raises:
        MisuseError: A parameter is in no layer of the pipeline, or a layer that shares one has others too.
    """
    stages: dict[int, list[int]] = {}
    for index, of_stage in enumerate(layers):
        for parameter in {parameter for layer in of_stage for parameter in layer.parameters()}:
            stages.setdefault(id(parameter), []).append(index)
    shared = []
    for name, parameter in module.named_parameters():
        indices = stages.get(id(parameter), [])
        if not indices:
            raise MisuseError(
                f"the pipeline has no layer with the parameter {name!r} of {type(module).__name__}: add its layer"
            )
        positions = sorted({index % ranks for index in indices})
        if len(positions) > 1:
            names = [other for other, value in module.named_parameters(remove_duplicate=False) if value is parameter]
            owners = {other.rpartition(".")[0]: other.rpartition(".")[2] for other in names}
            attributes = set(owners.values())
            for owner in owners:
                if len(attributes) > 1 or len(list(module.get_submodule(owner).parameters(recurse=False))) > 1:
                    raise MisuseError(
                        f"the parameter {name!r} is in stages {' and '.join(map(str, indices))} of the pipeline, and "
                        f"the layer {owner!r} has others beside it, of which a stage would have to allocate all: untie "
                        "it, or leave pp out"
                    )
            shared.append(
                SharedParameter(
                    owners={owner: module.get_submodule(owner) for owner in owners},
                    attribute=attributes.pop(),
                    positions=tuple(positions),
                )
            )
    return shared


def _bounds(sizes: Sequence[int], count: int) -> list[int]:
    """Return the index of each stage's first layer, and the number of layers."""
    if len(sizes) < count:
        raise RequestError(f"the pipeline has {len(sizes)} layers, and each of its {count} stages needs one: give less")
    total, passed, stages = sum(sizes), 0, []
    for size in sizes:
        stages.append(min(count - 1, int(count * (passed + size / 2) / max(total, 1))))
        passed += size
    if set(stages) != set(range(count)):  # a very large layer leaves a stage without one
        stages = [position * count // len(sizes) for position in range(len(sizes))]
    return [*(stages.index(stage) for stage in range(count)), len(sizes)]


# Random numbers of layers, beside those that all ranks of a batch draw


class LayerRandomNumbers:
    """Random states of torch on the CPU and the device, from which the layers of a rank draw.

    Ranks of different stages or experts draw different amounts, such as for dropout.  From the process's states they
    would leave different ones, from which the loaders of all ranks of a batch draw next.

    Args:
        strategy: Of the run.
        states: The states of the generators.

    Attributes:
        states: The states of the generators: of the CPU, and of the device if it has one.
    """

    def __init__(self, strategy: Strategy, states: Sequence[Tensor]) -> None:
        self._strategy = strategy
        self.states = states

    @classmethod
    def of_stage(cls, strategy: Strategy, stage: int) -> Self:
        """Return those of a stage; they follow from the process's states, which do not change."""
        outside = generator_states(strategy)
        seeds = torch.empty(stage + 1, dtype=torch.int64).random_()
        torch.manual_seed(int(seeds[-1]))  # devices, too
        states = generator_states(strategy)
        _set_generators(strategy, outside)
        return cls(strategy, states)

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """In this context random numbers are those of the layers."""
        outside = generator_states(self._strategy)
        _set_generators(self._strategy, self.states)
        try:
            yield
        finally:
            self.states = generator_states(self._strategy)
            _set_generators(self._strategy, outside)


def generator_states(strategy: Strategy) -> list[Tensor]:
    """Return the states of torch's generators: of the CPU, and of the device if it has one."""
    of_device = strategy.get_random_state()
    return [torch.get_rng_state(), *([] if of_device is None else [of_device])]


def _set_generators(strategy: Strategy, states: Sequence[Tensor]) -> None:
    torch.set_rng_state(states[0])
    for of_device in states[1:]:
        strategy.set_random_state(of_device)
