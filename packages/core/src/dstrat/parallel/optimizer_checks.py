"""Checks of optimizers: their parameters, steps of copies with small tensors, and steps outside of the strategy."""

from __future__ import annotations

import contextlib
import copy
import itertools
import sys
import warnings
import weakref
from collections import Counter, defaultdict
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from dstrat.errors import MisuseError
from dstrat.interfaces.batch import tensors_in

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer

Divide: TypeAlias = "Callable[[Tensor], list[Tensor]]"

# torch's optimizers that treat each element by itself, and compute no loss but the first one
ELEMENT_WISE = {
    getattr(torch.optim, name)
    for name in ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "SGD")
}
PROBE_SHAPE = (7, 6)  # divides unevenly among most numbers of ranks, and flat pieces are no full rows
_STEPS = 2  # momentum has an effect from the second one on
_RATE = 0.01  # a warm-up may begin with 0, which would hide all differences
_SCALES = (1.0, 1e-3, 1e3, 1e6)  # of gradients, whose norm is about 10: some optimizers clip above a threshold
_TOLERANCE = 1e-4  # relative; another order of sums differs by less, another formula by more


def check_optimizers(optimizers: Sequence[Optimizer], module: Module) -> None:
    """Check the optimizers of a module that has been sharded.

    Raises:
        MisuseError: Two of them share a parameter, or one has parameters from before the module was sharded.
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    owners: dict[int, int] = {}
    for index, optimizer in enumerate(optimizers):
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        strange = sum(id(parameter) not in names for parameter in parameters)
        if strange:
            raise MisuseError(
                f"the {type(optimizer).__name__} has {strange} of {len(parameters)} parameters that are none of "
                f"{type(module).__name__}'s, such as those that were read before the strategy replaced them: read all "
                "of them where the optimizer is made (configure_optimizers), from module.parameters()"
            )
        for parameter in parameters:
            first = owners.setdefault(id(parameter), index)
            if first != index:
                raise MisuseError(
                    f"optimizers {first} and {index} share the parameter {names[id(parameter)]!r}, and both "
                    "would apply its gradient: give each parameter to one of them"
                )


def check_one_dtype(module: Module, strategy: str) -> None:
    """Check that all trained parameters of a module have one dtype.

    Args:
        module: The module to be trained.
        strategy: Name of the strategy, which joins parameters of one dtype in flat tensors.

    Raises:
        MisuseError: Dtypes differ.
    """
    trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    first = next(iter(trained), None)
    for name, parameter in trained.items():
        if first is not None and parameter.dtype != trained[first].dtype:
            raise MisuseError(
                f"parameters {first!r} of {trained[first].dtype} and {name!r} of {parameter.dtype} are both trained, "
                f"and {strategy} takes one dtype: convert one of them, or choose strategy='ddp', which keeps both"
            )


def check_layout(optimizer: Optimizer) -> None:
    """Check that an optimizer has no state beside that of parameters, which cannot be sharded as they are.

    Optimizers other than torch's make some state in their first step, so that a copy of them is stepped.

    Raises:
        MisuseError: Its ``state_dict`` has a layout of its own, or a state of all parameters.
    """
    state = optimizer.state_dict()
    extra_keys = sorted(map(str, state.keys() - {"state", "param_groups"}))
    if not {"state", "param_groups"} <= state.keys():
        extra_keys = extra_keys or ["no state"]
    elif type(optimizer) not in ELEMENT_WISE:
        extra_keys += sorted({f"state[{key!r}]" for key in _shared_keys(optimizer)})
    if extra_keys:
        raise MisuseError(
            f"the state_dict of {type(optimizer).__name__} has a layout of its own ({', '.join(extra_keys)}), which "
            "cannot be saved and loaded while the state of parameters is sharded: keep its values in "
            "self.state[parameter] or in param_groups, or train with strategy='ddp' and this optimizer itself, which "
            "shards nothing"
        )


def _shared_keys(optimizer: Optimizer) -> list[Any]:
    """Return the keys of an optimizer's state after a step that are no parameters."""
    keys = [key for key in optimizer.state if not isinstance(key, torch.Tensor)]
    for number, group in enumerate(optimizer.param_groups):
        parameter = next(iter(group["params"]), None)
        if parameter is None:
            continue
        # That of another stage of a pipeline is on the meta device, and a step with it would be collective.
        device = "cpu" if parameter.is_meta else parameter.device
        stepped = torch.ones(PROBE_SHAPE, dtype=parameter.dtype, device=device, requires_grad=True)
        with contextlib.suppress(Exception):  # any error of a third-party optimizer; its state is unknown then
            probe = _step_copy(optimizer, number, [stepped], [[torch.zeros_like(stepped)]])
            keys += [key for key in probe.state if not isinstance(key, torch.Tensor)]
    return keys


def state_after_one_step(optimizer: Optimizer, group: int, like: Tensor) -> dict[str, Any]:
    """Return an optimizer's state of a parameter of two elements after a step with zero gradients.

    Args:
        optimizer: The optimizer, of which a copy is used.
        group: Index of the group whose options are used.
        like: A tensor of the same device and dtype.

    Returns:
        The state by its keys; empty if a copy of the optimizer cannot step, such as a compiled one.
    """
    parameter = torch.zeros(2, dtype=like.dtype, device=like.device, requires_grad=True)
    try:
        return dict(_step_copy(optimizer, group, [parameter], [[torch.zeros_like(parameter)]]).state[parameter])
    except Exception:  # noqa: BLE001 - any error of a third-party optimizer; its state is unknown then
        return {}


def how_division_fails(
    optimizer: Optimizer, device: torch.device, divide: Callable[[Tensor], list[Tensor]]
) -> str | None:
    """Return why an optimizer cannot step a sharded matrix with the same results as a full one; None if it can.

    None too for an optimizer that fails with the full matrix, or that draws random numbers.  torch's element-wise
    optimizers are not tested.

    Args:
        optimizer: The optimizer, of which copies are used.
        device: Device of the step.
        divide: Returns a matrix in pieces, or as one DTensor; if that is collective, this function is too.

    Returns:
        The first sentence of the error of torch or the optimizer, its type if it has none, or that results differ.
    """
    if type(optimizer) in ELEMENT_WISE:
        return None
    generator = torch.Generator().manual_seed(0)
    values, *gradients = (
        torch.randn(PROBE_SHAPE, generator=generator, device="cpu").to(device) for _ in range(_STEPS + 1)
    )
    random_groups: set[int] = set()
    for scale, number in itertools.product(_SCALES, _different_groups(optimizer)):
        if number in random_groups:
            continue
        scaled = [gradient * scale for gradient in gradients]
        with warnings.catch_warnings(), torch.random.fork_rng([] if device.type == "cpu" else [device]):
            warnings.simplefilter("ignore")
            once, again, divided = (
                _run_probe(optimizer, number, values, scaled, cut) for cut in (_undivided, _undivided, divide)
            )
        if isinstance(once, Exception) or isinstance(again, Exception) or not _same(once, again):
            random_groups.add(number)
        elif isinstance(divided, Exception):
            return str(divided).partition("\n")[0].partition(". ")[0].rstrip(".") or type(divided).__name__
        elif not _same(once, divided):
            return "the results would differ"
    return None


def how_flat_pieces_fail(optimizer: Optimizer, device: torch.device) -> str | None:
    """Return why an optimizer cannot step flat pieces of parameters, of which each rank has some; None if it can."""
    # A piece of 9 elements is not a multiple of a row, so that row-wise optimizers fail.
    reason = how_division_fails(optimizer, device, lambda full: [piece.clone() for piece in full.flatten().split(9)])
    return reason or find_coupling(optimizer, may_draw=True) or _indivisible_state(optimizer)


def _indivisible_state(optimizer: Optimizer) -> str | None:
    """Return which state of a parameter cannot be saved by its elements; None if each has a value or is a number.

    A tensor of one element is a number, such as that of steps, and all pieces must have the same.
    """
    if type(optimizer) in ELEMENT_WISE:
        return None
    generator = torch.Generator().manual_seed(0)
    for number in _different_groups(optimizer):
        values, gradients = (
            torch.randn((2, *PROBE_SHAPE), generator=generator, device="cpu").flatten(1) for _ in range(2)
        )
        pieces: list[Tensor] = [piece.clone().requires_grad_() for piece in values]
        # Any error of a third-party optimizer is ignored; its state is unknown then.
        with contextlib.suppress(Exception), torch.random.fork_rng([]):
            probe = _step_copy(optimizer, number, pieces, [[*gradients.clone()]])
            first, second = (probe.state[piece] for piece in pieces)
            for key, value in first.items():
                if (scalar := _as_number(value)) is not None:
                    if repr(scalar) != repr(_as_number(second.get(key))):  # of which nan equals itself
                        return f"its state {key!r} is a number of the whole parameter"
                elif isinstance(value, torch.Tensor):
                    if value.shape != pieces[0].shape:
                        return f"its state {key!r} is a tensor of another shape than the parameter"
                elif tensors_in(value):
                    return f"its state {key!r} has tensors in a {type(value).__name__}"
    return None


def _as_number(value: Any) -> float | bool | None:
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else None
    return value if isinstance(value, int | float) else None


def find_coupling(optimizer: Optimizer, *, may_draw: bool = False) -> str | None:
    """Return why steps of some of the parameters differ from a step of all of them; None if they do not.

    Args:
        optimizer: The optimizer, of which copies step small matrices on the CPU.
        may_draw: Whether None is returned for an optimizer that draws random numbers, or fails with such matrices.
    """
    if type(optimizer) in ELEMENT_WISE:
        return None
    generator = torch.Generator().manual_seed(0)
    shapes = (PROBE_SHAPE, PROBE_SHAPE[::-1])
    random = partial(torch.randn, generator=generator, device="cpu")
    values = [random(shape) for shape in shapes]
    # Of one direction mostly, and more than _STEPS: rates that all gradients determine (Prodigy) grow only then.
    slopes = [torch.randn(shape, generator=generator, device="cpu") for shape in shapes]
    gradients = [
        [slope + 0.1 * torch.randn(slope.shape, generator=generator, device="cpu") for slope in slopes]
        for _ in range(3 * _STEPS)
    ]

    def changes(number: int, rate: float, scale: float, *indices: int) -> list[Tensor]:
        parameters = [values[index].clone().requires_grad_() for index in indices]
        of_steps = [[of_step[index] * scale for index in indices] for of_step in gradients]
        _step_copy(optimizer, number, parameters, of_steps, rate)
        return [one.detach() - values[index] for one, index in zip(parameters, indices, strict=True)]

    # A rate of 1 too: with less, the factor that Prodigy computes grows too slowly to show.
    for scale, number, rate in itertools.product(_SCALES, _different_groups(optimizer), (_RATE, 1.0)):
        with warnings.catch_warnings(), torch.random.fork_rng([]):
            warnings.simplefilter("ignore")
            before = torch.get_rng_state()
            try:
                together = changes(number, rate, scale, 0, 1)
                apart = [*changes(number, rate, scale, 0), *changes(number, rate, scale, 1)]
            except Exception as error:  # noqa: BLE001 - any error of a third-party optimizer
                if scale != 1.0:
                    continue  # of the scale, perhaps: the others have worked
                return None if may_draw else f"a copy of it fails with small matrices on the CPU: {error}"
            if not torch.equal(before, torch.get_rng_state()):
                return None if may_draw else "it draws random numbers"
        is_finite = all(bool(change.isfinite().all()) for change in together)
        if is_finite and not all(map(_same, together, apart)):
            return "its step of a parameter depends on the others"
    return None


def _different_groups(optimizer: Optimizer) -> list[int]:
    """Return the first one of the groups that differ in parameters and rates only, which copies replace."""
    numbers: dict[str, int] = {}
    replaced = ("params", "param_names", "lr", "initial_lr")
    for number, group in enumerate(optimizer.param_groups):
        options = {name: value for name, value in group.items() if name not in replaced}
        numbers.setdefault(repr(options), number)
    return [*numbers.values()]


def _undivided(tensor: Tensor) -> list[Tensor]:
    return [tensor.clone()]


def _run_probe(
    optimizer: Optimizer, group: int, values: Tensor, gradients: Sequence[Tensor], cut: Divide
) -> Tensor | Exception:
    """Return the change of the values, or the error."""
    parameters = [piece.requires_grad_() for piece in cut(values)]
    try:
        _step_copy(optimizer, group, parameters, [cut(gradient) for gradient in gradients])
        pieces = [piece.detach() for piece in parameters]
        full = [piece.full_tensor() if hasattr(piece, "full_tensor") else piece for piece in pieces]
        return torch.cat([piece.flatten() for piece in full]) - values.flatten()
    except Exception as error:  # noqa: BLE001 - any error of a third-party optimizer
        return error


def _same(one: Tensor, other: Tensor) -> bool:
    return bool((one - other).abs().max() <= _TOLERANCE * one.abs().max())


def _step_copy(
    optimizer: Optimizer,
    group: int,
    parameters: list[Tensor],
    gradients: Sequence[Sequence[Tensor]],
    rate: float = _RATE,
) -> Optimizer:
    """Return a copy of an optimizer after steps of other parameters, one for each of the gradients."""
    probe = copy_with(optimizer, group, parameters, rate)
    try:
        _step(probe, parameters, gradients)
    except KeyError:  # Adagrad makes its state in the constructor, others in the first step
        probe.state.update(type(optimizer)(parameters, **optimizer.defaults).state)
        _step(probe, parameters, gradients)
    return probe


def copy_with(optimizer: Optimizer, group: int, parameters: list[Tensor], new_rate: float) -> Optimizer:
    """Return a copy of an optimizer, without its state, for a trial with other parameters.

    Args:
        optimizer: The optimizer.  An optimizer within it, as of a wrapper, is not copied.
        group: Index of the group whose options are used.
        parameters: The parameters of the copy.
        new_rate: Its learning rate.
    """
    if hasattr(type(optimizer), "__del__"):
        raise TypeError("__del__ of a copy would free resources of the optimizer")
    # A copy gives the class a step that calls hooks, which a wrapper without torch's constructor does not have yet.
    torch.optim.Optimizer.__setstate__(optimizer, {})
    probe = copy.copy(optimizer)
    for name, value in vars(optimizer).items():  # Optimizer.__getstate__ has torch's attributes only
        vars(probe).setdefault(name, value)
    options = {**optimizer.param_groups[group], "params": parameters}
    rate = options.get("lr")
    if isinstance(rate, int | float | torch.Tensor):
        options["lr"] = torch.full_like(rate, new_rate) if isinstance(rate, torch.Tensor) else new_rate
    probe.state, probe.param_groups = defaultdict(dict), [options]
    return probe


def _step(probe: Optimizer, parameters: Sequence[Tensor], gradients: Sequence[Sequence[Tensor]]) -> None:
    for of_step in gradients:
        for parameter, gradient in zip(parameters, of_step, strict=True):
            parameter.grad = gradient
        type(probe).step(probe)  # an instance attribute may be a scheduler's wrapper, bound to the original


# Optimizers of the user that a strategy does not know


class FirstParameters:
    """The parameters of a module as they were before a strategy replaced them, if something else refers to them.

    The references are strong ones, and last until :meth:`take_replaced`: torch swaps no tensors that have weak ones
    (``swap_tensors``).
    """

    def __init__(self) -> None:
        self._held: dict[int, tuple[str, Tensor]] = {}  # by identity

    def record(self, module: Module) -> None:
        """Hold the present parameters to which more than the layers of a module refer, beside those held before."""
        layers = Counter(
            id(parameter)
            for layer in module.modules()
            for _, parameter in layer.named_parameters(recurse=False, remove_duplicate=False)
        )
        named = dict(module.named_parameters())
        probe = object()
        num_references = sys.getrefcount(probe)  # as many of a parameter are those of this function
        for name in list(named):
            parameter = named.pop(name)
            if type(parameter) is not torch.nn.Parameter or id(parameter) in self._held:  # such as a shard
                continue
            if sys.getrefcount(parameter) > num_references + layers[id(parameter)]:
                self._held[id(parameter)] = name, parameter

    def take_replaced(self, module: Module) -> dict[str, weakref.ref[Tensor]]:
        """Return those for which a module has others by now and that are still in use, by name; hold none any more."""
        present = dict(module.named_parameters(remove_duplicate=False))
        ids = set(map(id, present.values()))
        replaced = {
            name: weakref.ref(one) for name, one in self._held.values() if name in present and id(one) not in ids
        }
        self._held.clear()
        return {name: reference for name, reference in replaced.items() if reference() is not None}


class StepGuard:
    """Refuses steps of any optimizer of this process with some parameters, until it is removed.

    Args:
        parameters: Returns these parameters, by name; called for each optimizer that steps for the first time.
        reason: What a step of them does, and what to do; it follows "the SGD steps 'weight' and 3 other parameters, ".
    """

    def __init__(self, parameters: Callable[[], Mapping[str, Tensor | None]], reason: str) -> None:
        self._parameters, self._reason = parameters, reason
        self._checked: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._hook = register_optimizer_step_pre_hook(self._check)

    def remove(self) -> None:
        """Let all optimizers step again."""
        self._hook.remove()

    def _check(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        if self._checked.get(optimizer) == count:  # it may get further groups
            return
        refused = {id(one): name for name, one in self._parameters().items() if one is not None}
        stepped = (id(parameter) for group in optimizer.param_groups for parameter in group["params"])
        names = [refused[identity] for identity in stepped if identity in refused]
        if not names:
            self._checked[optimizer] = count
            return
        beside = f" and {len(names) - 1} other parameters" if len(names) > 1 else ""
        raise MisuseError(f"the {type(optimizer).__name__} steps {names[0]!r}{beside}, {self._reason}")
