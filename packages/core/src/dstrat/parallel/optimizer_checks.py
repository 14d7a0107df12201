"""Checks of optimizers whose parameters are divided: which they have, and how copies of them step small tensors."""

from __future__ import annotations

import copy
import warnings
from collections import defaultdict
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from dstrat.errors import MisuseError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer

Divide: TypeAlias = "Callable[[Tensor], list[Tensor]]"

_ELEMENT_WISE = {
    getattr(torch.optim, name)
    for name in ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "SGD")
}
_SHAPE = (7, 6)  # few pieces are as large as others, and no piece of 9 elements is a row
_STEPS = 2  # momentum shows in the second one
_RATE = 0.01  # a warm-up may begin with 0, with which no step shows anything
_TOLERANCE = 1e-4  # relative; another order of sums gives less, another formula more


def check_optimizers(optimizers: Sequence[Optimizer], module: Module) -> None:
    """Check the optimizers of a module that has been sharded.

    Raises:
        MisuseError: Two of them share a parameter, or one has parameters of before the module was sharded.
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    owners: dict[int, int] = {}
    for index, optimizer in enumerate(optimizers):
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        strange = sum(id(parameter) not in names for parameter in parameters)
        if strange:
            raise MisuseError(
                f"the {type(optimizer).__name__} has {strange} of {len(parameters)} parameters that are none of "
                f"{type(module).__name__}'s: they were taken before the module was sharded, which replaces them; take "
                "all of them in configure_optimizers, from self.parameters()"
            )
        for parameter in parameters:
            first = owners.setdefault(id(parameter), index)
            if first != index:
                raise MisuseError(
                    f"optimizers {first} and {index} share the parameter {names.get(id(parameter), '?')!r}, and both "
                    "would apply its gradient: give each parameter to one of them"
                )


def state_after_one_step(optimizer: Optimizer, group: int, like: Tensor) -> dict[str, Any]:
    """Return the state that the optimizer has of a parameter of two elements after a step without gradients.

    Args:
        optimizer: Stays as it is.
        group: Index of the group whose options count.
        like: Says device and dtype.

    Returns:
        The state by its keys; empty where a copy of the optimizer cannot step, as one that is compiled.
    """
    parameter = torch.zeros(2, dtype=like.dtype, device=like.device, requires_grad=True)
    try:
        return dict(_step_copy(optimizer, group, [parameter], [[torch.zeros_like(parameter)]]).state[parameter])
    except Exception:  # noqa: BLE001 - whatever a stranger's optimizer raises; then nothing is known of it
        return {}


def how_division_fails(
    optimizer: Optimizer, device: torch.device, divide: Callable[[Tensor], list[Tensor]]
) -> str | None:
    """Return what goes wrong when the optimizer steps a divided matrix in place of a whole one; None if nothing does.

    Nothing is known of an optimizer that fails with the whole matrix too, or that draws random numbers.  Those of torch
    that treat each element by itself are not tried.

    Args:
        optimizer: Stays as it is.
        device: Where it steps.
        divide: Returns a matrix as the optimizer gets it: in pieces, or as one DTensor; where that is collective, so
            is this function.

    Returns:
        The first sentence of what torch or the optimizer has raised, or that results differ.
    """
    if type(optimizer) in _ELEMENT_WISE:
        return None
    generator = torch.Generator().manual_seed(0)
    values, *gradients = (torch.randn(_SHAPE, generator=generator).to(device) for _ in range(_STEPS + 1))
    for number in range(len(optimizer.param_groups)):
        with warnings.catch_warnings(), torch.random.fork_rng([] if device.type == "cpu" else [device]):
            warnings.simplefilter("ignore")
            once, again, divided = (
                _run_probe(optimizer, number, values, gradients, cut) for cut in (_undivided, _undivided, divide)
            )
        if isinstance(once, Exception) or isinstance(again, Exception) or not _same(once, again):
            continue
        if isinstance(divided, Exception):
            return str(divided).partition("\n")[0].partition(". ")[0].rstrip(".")
        if not _same(once, divided):
            return "the results would differ"
    return None


def _undivided(tensor: Tensor) -> list[Tensor]:
    return [tensor.clone()]


def _run_probe(
    optimizer: Optimizer, group: int, values: Tensor, gradients: Sequence[Tensor], cut: Divide
) -> Tensor | Exception:
    """Return by how much the values have changed, or what was raised."""
    parameters = [piece.requires_grad_() for piece in cut(values)]
    try:
        _step_copy(optimizer, group, parameters, [cut(gradient) for gradient in gradients])
        pieces = [piece.detach() for piece in parameters]
        full = [piece.full_tensor() if hasattr(piece, "full_tensor") else piece for piece in pieces]
        return torch.cat([piece.flatten() for piece in full]) - values.flatten()
    except Exception as error:  # noqa: BLE001 - whatever a stranger's optimizer raises
        return error


def _same(one: Tensor, other: Tensor) -> bool:
    return bool((one - other).abs().max() <= _TOLERANCE * one.abs().max())


def _step_copy(
    optimizer: Optimizer, group: int, parameters: list[Tensor], gradients: Sequence[Sequence[Tensor]]
) -> Optimizer:
    """Return a copy of the optimizer that has stepped other parameters, once for each of the gradients."""
    probe = _copy(optimizer, group, parameters)
    try:
        _step(probe, parameters, gradients)
    except KeyError:  # Adagrad makes its state in the constructor, others in the first step
        probe.state.update(type(optimizer)(parameters, **optimizer.defaults).state)
        _step(probe, parameters, gradients)
    return probe


def _copy(optimizer: Optimizer, group: int, parameters: list[Tensor]) -> Optimizer:
    if hasattr(type(optimizer), "__del__"):
        raise TypeError("the end of a copy would free what belongs to the optimizer")
    probe = copy.copy(optimizer)
    for name, value in vars(optimizer).items():  # torch copies its own attributes alone
        vars(probe).setdefault(name, value)
    options = {**optimizer.param_groups[group], "params": parameters}
    rate = options.get("lr")
    if isinstance(rate, int | float | torch.Tensor):
        options["lr"] = torch.full_like(rate, _RATE) if isinstance(rate, torch.Tensor) else _RATE
    probe.state, probe.param_groups = defaultdict(dict), [options]
    return probe


def _step(probe: Optimizer, parameters: Sequence[Tensor], gradients: Sequence[Sequence[Tensor]]) -> None:
    for of_step in gradients:
        for parameter, gradient in zip(parameters, of_step, strict=True):
            parameter.grad = gradient
        type(probe).step(probe)  # the instance's own may be a scheduler's, which is bound to the original
