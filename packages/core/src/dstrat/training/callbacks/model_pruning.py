"""Callback that prunes a module's parameters while it is trained."""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn.utils import prune
from typing_extensions import override

from dstrat.errors import CheckpointError, ConflictError, RequestError
from dstrat.training.callbacks.callback import Callback

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from dstrat.interfaces.strategy import Strategy
    from dstrat.training.module.train_module import TrainModule
    from dstrat.training.trainer import Trainer

Parameters = Sequence[tuple[nn.Module, str]]
"""Pairs of a module and the name of one of its parameters."""

_METHODS: dict[str, type[prune.BasePruningMethod]] = {
    "l1_unstructured": prune.L1Unstructured,
    "ln_structured": prune.LnStructured,
    "random_structured": prune.RandomStructured,
    "random_unstructured": prune.RandomUnstructured,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "l1_unstructured": prune.l1_unstructured,
    "ln_structured": prune.ln_structured,
    "random_structured": prune.random_structured,
    "random_unstructured": prune.random_unstructured,
}
_ENTRY = "pruning"  # of a checkpoint

_log = logging.getLogger(__name__)


class ModelPruning(Callback):
    """Prune parameters with :mod:`torch.nn.utils.prune` in each epoch.

    A pruned parameter is multiplied by a mask of zeros and ones for the rest of the training; the masks are the same in
    every process.  In checkpoints and at the end the parameters have their own names again, with zeros, so that they
    load into a module that is not pruned; a resumed training restores the masks too.

    Strategies that shard parameters cannot prune them, nor can groups that train apart.

    Args:
        pruning_fn: ``"l1_unstructured"``, ``"random_unstructured"``, ``"ln_structured"`` or ``"random_structured"``, or
            a class derived from :class:`torch.nn.utils.prune.BasePruningMethod`, which need not take an ``amount``.
        parameters_to_prune: Pairs of a module and a parameter's name; by default all ``parameter_names``.
        parameter_names: Names of the pruned parameters without such pairs; by default ``("weight", "bias")``.
        use_global_unstructured: Whether ``amount`` applies to all parameters together, not to each.
        amount: Fraction of the remaining elements that are pruned in an epoch, 0.0 to 1.0, or their number as an int;
            or a function of the epoch's index that returns it; by default 0.5, or what the class decides.
        apply_pruning: Whether to prune; or a function of the epoch's index that returns it.
        make_pruning_permanent: Whether the module has plain parameters without masks at the end and in checkpoints.
        use_lottery_ticket_hypothesis: Whether parameters are reset to their initial values after each pruning
            (https://arxiv.org/abs/1803.03635, page 2); or a function of the epoch's index that returns it.
        resample_parameters: Whether they are reset to newly drawn values instead.
        pruning_dim: Dimension along which a structured method prunes.
        pruning_norm: The n of the norm by which ``"ln_structured"`` compares.
        verbose: 1 logs how much is pruned, 2 also for each parameter.
        prune_on_train_epoch_end: Whether to prune after an epoch's training, not after each validation.

    Raises:
        RequestError: An argument is out of range.
    """

    PARAMETER_NAMES = ("weight", "bias")
    renames_parameters = True

    def __init__(
        self,
        pruning_fn: str | type[prune.BasePruningMethod],
        parameters_to_prune: Parameters = (),
        parameter_names: Sequence[str] | None = None,
        use_global_unstructured: bool = True,
        amount: float | Callable[[int], float] | None = None,
        apply_pruning: bool | Callable[[int], bool] = True,
        make_pruning_permanent: bool = True,
        use_lottery_ticket_hypothesis: bool | Callable[[int], bool] = True,
        resample_parameters: bool = False,
        pruning_dim: int | None = None,
        pruning_norm: int | None = None,
        verbose: int = 0,
        prune_on_train_epoch_end: bool = True,
    ) -> None:
        names = self.PARAMETER_NAMES if parameter_names is None else tuple(parameter_names)
        unknown = [name for name in names if name not in self.PARAMETER_NAMES]
        if unknown:
            raise RequestError(f"parameter_names={parameter_names!r} may have 'weight' and 'bias', not {unknown[0]!r}")
        is_number = isinstance(amount, int | float) and not isinstance(amount, bool)
        if not (amount is None or is_number or callable(amount)):
            raise RequestError(f"amount={amount!r} must be a float from 0.0 to 1.0, an int, or a function of the epoch")
        if verbose not in (0, 1, 2):
            raise RequestError(f"verbose={verbose!r} must be 0, 1 or 2")
        if parameters_to_prune and parameter_names is not None:
            raise ConflictError(
                "parameters_to_prune has the names of the pruned parameters, so parameter_names would be ignored: "
                "pass one of them"
            )
        if resample_parameters and not use_lottery_ticket_hypothesis:
            raise ConflictError(
                "resample_parameters=True draws new values when parameters are reset, which "
                f"use_lottery_ticket_hypothesis={use_lottery_ticket_hypothesis!r} switches off: pass one of them"
            )
        self._prune = _pruner(
            pruning_fn, is_global=use_global_unstructured, amount=amount, dim=pruning_dim, norm=pruning_norm
        )
        self._method_name = pruning_fn if isinstance(pruning_fn, str) else pruning_fn.__name__
        self._requested_parameters, self._parameter_names = parameters_to_prune, names
        self._amount = 0.5 if amount is None else amount
        self._applies = apply_pruning
        self._is_permanent = make_pruning_permanent
        self._uses_lottery_ticket, self._resamples = use_lottery_ticket_hypothesis, resample_parameters
        self._verbose, self._prunes_after_training = verbose, prune_on_train_epoch_end
        self._parameters: Parameters = ()
        self._paths: dict[nn.Module, str] = {}
        self._initial: dict[str, nn.Module] = {}
        self._restored: dict[str, Any] = {}
        self._final_masks: dict[str, Tensor] = {}

    def filter_parameters_to_prune(self, parameters_to_prune: Parameters = ()) -> Parameters:
        """Return the parameters to prune; for subclasses that exclude some."""
        return parameters_to_prune

    # The run

    @override
    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        if stage != "fit":
            return
        if not trainer.strategy.replicates_state:
            raise ConflictError(
                f"{type(self).__name__} needs the whole parameters in each process, and "
                f"{type(trainer.strategy).__name__} shards them: leave the callback out, or choose another strategy"
            )
        parameters = self._requested_parameters
        if parameters:
            _check_parameters(module, parameters)
        else:
            containers = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
            layers = [layer for layer in module.modules() if layer is not module and not isinstance(layer, containers)]
            parameters = [
                (layer, name)
                for name in self._parameter_names
                for layer in layers
                if isinstance(getattr(layer, name, None), nn.Parameter)
            ]
        self._parameters = self.filter_parameters_to_prune(parameters)
        self._restored, self._final_masks = {}, {}
        self._initial = {}
        if self._tickets:
            paths = _paths(module)
            self._paths = {layer: paths[layer] for layer, _ in self._parameters}
            self._initial = {path: copy.deepcopy(layer) for layer, path in self._paths.items()}

    @property
    def _tickets(self) -> bool:
        return callable(self._uses_lottery_ticket) or self._uses_lottery_ticket

    @override
    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._restore_masks(module)  # not before weights and optimizers are loaded, under the plain names

    def _restore_masks(self, module: TrainModule) -> None:
        for layer, name, full_name in _with_full_names(module, self._parameters):
            mask = self._restored.pop(full_name, None)
            if mask is not None:
                prune.custom_from_mask(layer, name, mask.to(getattr(layer, name).device))

    @override
    def on_train_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        if self._prunes_after_training:
            self._run(trainer, module)

    @override
    def on_validation_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        if trainer.is_fitting and not trainer.sanity_checking and not self._prunes_after_training:
            self._run(trainer, module)

    def _run(self, trainer: Trainer, module: TrainModule) -> None:
        epoch, strategy = trainer.current_epoch, trainer.strategy
        amount = self._amount(epoch) if callable(self._amount) else self._amount
        # Functions of the user may decide by a value that differs between ranks.
        amount = strategy.broadcast(amount if amount and _value(self._applies, epoch) else 0)
        if not amount:
            return
        before = self._count_pruned()
        self.apply_pruning(amount)
        _broadcast_masks(strategy, self._parameters)
        if self._verbose and trainer.is_global_zero:
            self._log_pruned(module, before)
        if strategy.broadcast(bool(_value(self._uses_lottery_ticket, epoch))):
            self.apply_lottery_ticket_hypothesis()
            _broadcast_parameters(strategy, self._parameters)

    def apply_pruning(self, amount: float) -> None:
        """Prune an amount of the remaining elements."""
        self._prune(self._parameters, amount)

    def apply_lottery_ticket_hypothesis(self) -> None:
        """Reset the parameters to their initial values, or to new ones; masks stay."""
        fresh: dict[str, nn.Module] = {}
        for layer, name in self._parameters:
            path = self._paths[layer]
            if path not in fresh:
                fresh[path] = self._initial[path]
                reset = getattr(fresh[path], "reset_parameters", None)
                if self._resamples and callable(reset):
                    fresh[path] = copy.deepcopy(fresh[path])
                    fresh[path].reset_parameters()  # type: ignore[operator]  # it is callable
            _trained(layer, name).data.copy_(getattr(fresh[path], name))

    def make_pruning_permanent(self, module: nn.Module) -> None:  # noqa: ARG002 - the public vocabulary
        """Remove the masks, and leave the zeros in the parameters."""
        for layer, name in self._parameters:
            if hasattr(layer, f"{name}_mask"):
                prune.remove(layer, name)

    @override
    def on_train_end(self, trainer: Trainer, module: TrainModule) -> None:
        if self._is_permanent:
            self._final_masks = self._masks(module)  # for a checkpoint after the end, which can be resumed
            self.make_pruning_permanent(module)

    # Checkpoints

    @override
    def on_save_checkpoint(self, trainer: Trainer, module: TrainModule, checkpoint: dict[str, Any]) -> None:
        masks = self._masks(module) or self._final_masks
        if not masks:
            return
        state = checkpoint["state_dict"] = dict(checkpoint["state_dict"])
        for name, mask in masks.items():
            if f"{name}_orig" in state and self._is_permanent:
                trained = state.pop(f"{name}_orig")
                state[name] = trained * mask.to(trained)
                state.pop(f"{name}_mask", None)  # buffers are in the state of rank 0 only
        if "loops" in checkpoint:  # otherwise it has weights only, and cannot be resumed
            if self._is_permanent:
                _rename_in_optimizers(checkpoint, {f"{name}_orig": name for name in masks})
            checkpoint[_ENTRY] = {"masks": masks, "initial": self._initial_values(masks)}

    @override
    def on_load_checkpoint(self, trainer: Trainer, module: TrainModule, checkpoint: dict[str, Any]) -> None:
        if not trainer.is_fitting or _ENTRY not in checkpoint:
            return
        self._restored = dict(checkpoint[_ENTRY]["masks"])
        names = {full_name for _, _, full_name in _with_full_names(module, self._parameters)}
        unknown = sorted(self._restored.keys() - names)
        if unknown:
            raise CheckpointError(
                f"the checkpoint has a pruned {unknown[0]!r}, which this {type(self).__name__} does not prune: "
                "pass the same parameters_to_prune or parameter_names as at the start of the training"
            )
        paths = _paths(module)
        for layer, name, full_name in _with_full_names(module, self._parameters):
            initial = checkpoint[_ENTRY]["initial"].get(full_name)
            if initial is not None and paths[layer] in self._initial:
                getattr(self._initial[paths[layer]], name).data.copy_(initial)
        if not self._is_permanent:
            self._restore_masks(module)  # the checkpoint has the names of pruned parameters

    def _masks(self, module: nn.Module) -> dict[str, Tensor]:
        """Return the masks by the names of the parameters."""
        return {
            full_name: getattr(layer, f"{name}_mask")
            for layer, name, full_name in _with_full_names(module, self._parameters)
            if hasattr(layer, f"{name}_mask")
        }

    def _initial_values(self, masks: dict[str, Tensor]) -> dict[str, Tensor]:
        values = {}
        for path, layer in self._initial.items():
            for name, value in layer.named_parameters(recurse=False):
                full = f"{path}.{name}" if path else name
                if full in masks:
                    values[full] = value.detach()
        return values

    # Logging

    def _count_pruned(self) -> list[tuple[int, int]]:
        """Return the number of pruned elements, and of all elements, of each parameter."""
        if not self._verbose:
            return []
        masks = [getattr(layer, f"{name}_mask", None) for layer, name in self._parameters]
        sizes = [_trained(layer, name).numel() for layer, name in self._parameters]
        return [(0 if mask is None else int((mask == 0).sum()), size) for mask, size in zip(masks, sizes, strict=True)]

    def _log_pruned(self, module: nn.Module, before: list[tuple[int, int]]) -> None:
        after = self._count_pruned()
        total = sum(size for _, size in after)
        earlier, now = (sum(pruned for pruned, _ in counts) for counts in (before, after))
        _log.info(
            "%s has pruned %d of %d parameters (%.2f %%), %d (%.2f %%) before",
            *(self._method_name, now, total, 100 * now / total, earlier, 100 * earlier / total),
        )
        if self._verbose < 2:
            return
        parameters = _with_full_names(module, self._parameters)
        for (_, _, full_name), (old, _), (new, size) in zip(parameters, before, after, strict=True):
            _log.info("%s: %d of %d pruned, %d before", full_name, new, size, old)


def _pruner(
    pruning_fn: Any, *, is_global: bool, amount: Any, dim: int | None, norm: int | None
) -> Callable[[Parameters, float], None]:
    """Return the function that prunes an amount of parameters.

    Raises:
        RequestError: The method is not known, lacks an argument, or would ignore one.
    """
    if isinstance(pruning_fn, str):
        name = pruning_fn.lower()
        if name not in _METHODS:
            raise RequestError(
                f"pruning_fn={pruning_fn!r} is not known: choose from {', '.join(_METHODS)}, or pass a class derived "
                "from torch.nn.utils.prune.BasePruningMethod"
            )
        method, function = _METHODS[name], _FUNCTIONS[name]
    elif isinstance(pruning_fn, type) and issubclass(pruning_fn, prune.BasePruningMethod):
        name, method, function = pruning_fn.__name__, pruning_fn, pruning_fn.apply
    else:
        raise RequestError(
            f"pruning_fn={pruning_fn!r} must be one of {', '.join(_METHODS)}, or a class derived from "
            "torch.nn.utils.prune.BasePruningMethod (the class, not an instance)"
        )
    takes_amount = _constructs_with_amount(method)
    if not is_global:  # which constructs the method itself, and does not call its function
        parameters = inspect.signature(function).parameters
        takes_amount = "amount" in parameters or (takes_amount and _has_var_keyword(parameters))
    if amount is not None and not takes_amount:
        raise ConflictError(
            f"amount={amount!r} would be ignored: {name}, the pruning_fn, takes no 'amount' where it is constructed; "
            f"leave amount out, or add it to {name}.__init__"
        )
    options = _slice_options(pruning_fn, dim, norm)
    if not is_global:
        return partial(_prune_each if takes_amount else _prune_each_by_itself, partial(function, **options))
    if getattr(method, "PRUNING_TYPE", None) != "unstructured":
        raise RequestError(
            f"pruning_fn={pruning_fn!r} prunes whole slices, and use_global_unstructured=True compares single elements "
            "of all parameters: pass use_global_unstructured=False"
        )
    return partial(_prune_together, method)


def _slice_options(pruning_fn: Any, dim: int | None, norm: int | None) -> dict[str, Any]:
    """Return the arguments of a structured method.

    Raises:
        RequestError: One is missing, or the method would ignore it.
    """
    name = pruning_fn.lower() if isinstance(pruning_fn, str) else ""
    takes_norm = name == "ln_structured"
    takes_dim = takes_norm or name == "random_structured"
    if takes_dim and dim is None:
        raise RequestError(f"pruning_fn={pruning_fn!r} needs pruning_dim, the dimension along which it prunes")
    if takes_norm and norm is None:
        raise RequestError(f"pruning_fn={pruning_fn!r} needs pruning_norm, the n of the norm by which it compares")
    for argument, value, has_effect, methods in (
        ("pruning_dim", dim, takes_dim, "'ln_structured' and 'random_structured'"),
        ("pruning_norm", norm, takes_norm, "'ln_structured'"),
    ):
        if value is not None and not has_effect:
            raise ConflictError(
                f"{argument}={value!r} would be ignored by pruning_fn={pruning_fn!r}, as it is for {methods}: "
                "leave it out"
            )
    return ({"dim": dim} if takes_dim else {}) | ({"n": norm} if takes_norm else {})


def _prune_each(function: Callable[..., Any], parameters: Parameters, amount: float) -> None:
    for layer, name in parameters:
        function(layer, name, amount=amount)


def _prune_each_by_itself(function: Callable[..., Any], parameters: Parameters, _amount: float) -> None:
    for layer, name in parameters:
        function(layer, name)


def _prune_together(method: type[prune.BasePruningMethod], parameters: Parameters, amount: float) -> None:
    options = {"amount": amount} if _constructs_with_amount(method) else {}
    prune.global_unstructured(parameters, pruning_method=method, **options)


def _constructs_with_amount(method: type[prune.BasePruningMethod]) -> bool:
    """Return whether a method is constructed with an ``amount``; its mask may depend on the values alone."""
    if method.__init__ is object.__init__:
        return False
    parameters = inspect.signature(method.__init__).parameters
    return "amount" in parameters or _has_var_keyword(parameters)


def _has_var_keyword(parameters: Mapping[str, inspect.Parameter]) -> bool:
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())


def _broadcast_masks(strategy: Strategy, parameters: Parameters) -> None:
    """Broadcast the masks of rank 0, since those of a random method differ; collective."""
    if strategy.world_size == 1:
        return
    masks = [getattr(layer, f"{name}_mask", None) for layer, name in parameters]
    rank_zero_masks = strategy.broadcast([None if mask is None else mask.bool().cpu() for mask in masks])
    for mask, values in zip(masks, rank_zero_masks, strict=True):
        if mask is not None:
            mask.copy_(values)


def _broadcast_parameters(strategy: Strategy, parameters: Parameters) -> None:
    """Broadcast the values of rank 0, since ranks may have drawn other first values, or new ones; collective."""
    if strategy.world_size == 1:
        return
    trained = [_trained(layer, name) for layer, name in parameters]
    rank_zero_values = strategy.broadcast([parameter.detach().cpu() for parameter in trained])
    for parameter, values in zip(trained, rank_zero_values, strict=True):
        parameter.data.copy_(values)


def _rename_in_optimizers(checkpoint: dict[str, Any], names: dict[str, str]) -> None:
    """Rename parameters in the optimizers' state."""
    if "optimizers" not in checkpoint:
        return
    checkpoint["optimizers"] = [
        {
            "state": {names.get(name, name): entry for name, entry in optimizer["state"].items()},
            "param_groups": [
                {**group, "params": [names.get(name, name) for name in group["params"]]}
                for group in optimizer["param_groups"]
            ],
        }
        for optimizer in checkpoint["optimizers"]
    ]


def _check_parameters(module: nn.Module, parameters: Any) -> None:
    pairs = isinstance(parameters, Sequence) and all(
        isinstance(pair, tuple | list)
        and len(pair) == 2
        and isinstance(pair[0], nn.Module)
        and isinstance(pair[1], str)
        for pair in parameters
    )
    if not pairs:
        raise RequestError(
            "parameters_to_prune must be pairs of a module and a parameter's name, such as [(net.layer, 'weight')]"
        )
    layers = set(module.modules())
    for layer, name in parameters:
        if layer not in layers:
            raise RequestError(
                f"parameters_to_prune has a {type(layer).__name__} that is not a layer of {type(module).__name__}: "
                "take the layers from the module that is trained"
            )
        if not isinstance(getattr(layer, name, None), nn.Parameter):
            names = ", ".join(repr(other) for other, _ in layer.named_parameters(recurse=False)) or "none"
            raise RequestError(
                f"parameters_to_prune names {name!r}, which is not a parameter of {layer}: its parameters are {names}"
            )


def _trained(layer: nn.Module, name: str) -> nn.Parameter:
    """Return the parameter that the optimizer updates: torch keeps that of a pruned one as ``<name>_orig``."""
    parameter: nn.Parameter = getattr(layer, f"{name}_orig" if hasattr(layer, f"{name}_orig") else name)
    return parameter


def _paths(module: nn.Module) -> dict[nn.Module, str]:
    return {layer: path for path, layer in module.named_modules()}


def _with_full_names(module: nn.Module, parameters: Parameters) -> Iterator[tuple[nn.Module, str, str]]:
    """Yield layer and name of each parameter, with its name in the module."""
    paths = _paths(module)
    for layer, name in parameters:
        yield layer, name, f"{paths[layer]}.{name}" if paths[layer] else name


def _value(choice: bool | Callable[[int], bool], epoch: int) -> bool:
    return choice(epoch) if callable(choice) else choice
