"""Private names of Lightning, as versions 2.5 and 2.6 have them."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dstrat.training.module.hyperparameters import Constructor, HyperparametersMixin, Saved
from dstrat.training.module.plain_values import AttributeDict, fields_of

if TYPE_CHECKING:
    from collections.abc import Iterable


# Modules and data modules


class ModuleAttributes:
    """Attributes of a TrainModule that are properties of a LightningModule, which has the values in its instance.

    Without these properties the class attributes of TrainModule would hide the values that the user's ``__init__`` set.
    """

    if TYPE_CHECKING:
        _automatic_optimization: bool
        _strict_loading: bool | None
        _example_input_array: Any

    @property
    def automatic_optimization(self) -> bool:
        """Whether the Trainer does the backward pass and the optimizer's step."""
        return self._automatic_optimization

    @automatic_optimization.setter
    def automatic_optimization(self, automatic_optimization: bool) -> None:
        self._automatic_optimization = automatic_optimization

    @property
    def strict_loading(self) -> bool:
        """Whether missing and unexpected weights of a checkpoint are errors."""
        return self._strict_loading is not False  # None is Lightning's default, and means strict

    @strict_loading.setter
    def strict_loading(self, strict_loading: bool) -> None:
        self._strict_loading = strict_loading

    @property
    def example_input_array(self) -> Any:
        """An argument of ``forward``, or several."""
        return self._example_input_array

    @example_input_array.setter
    def example_input_array(self, example: Any) -> None:
        self._example_input_array = example


def take_hyperparameters(owner: HyperparametersMixin) -> None:
    """Let a converted module or data module have the hyperparameters that its ``__init__`` saved by Lightning."""
    values: dict[str, Any] = vars(owner)
    argument = values.get("_hparams_name")
    owner._hyperparameters = Saved(  # the mixin's __new__ sets it, and did not run for this object
        current=AttributeDict(fields_of(values.get("_hparams") or {}) or {}),
        initial=AttributeDict(fields_of(values.get("_hparams_initial") or {}) or {}),
        # Lightning notes "kwargs" where each hyperparameter was an argument by itself.
        argument=argument if argument in Constructor.of(type(owner)).names else None,
        is_logged=bool(values.get("_log_hyperparams")),
    )


# Callbacks


def constructor_arguments(callback: Any, names: Iterable[str]) -> dict[str, Any]:
    """Return the arguments with which a callback of Lightning was made; those that its version lacks are left out.

    Each callback keeps an argument in an attribute of the same name, some with an underscore before it.
    """
    values = vars(callback)
    keys = {name: name if name in values else f"_{name}" for name in names}
    return {name: values[key] for name, key in keys.items() if key in values}


# Strategies


def make_optimizers(package: str, module: Any) -> tuple[list[Any], list[Any]]:
    """Return the optimizers and the configurations of schedulers that a LightningModule configures.

    Args:
        package: ``"lightning.pytorch"`` or ``"pytorch_lightning"``, whose module it is.
        module: The LightningModule, attached to Lightning's Trainer.
    """
    library = import_module(f"{package}.core.optimizer")
    # The public way, Strategy.setup_optimizers, sets the strategy's optimizers, which dstrat's have to be here.
    optimizers, schedulers = library._init_optimizers_and_lr_schedulers(module)
    return optimizers, schedulers


def make_launcher(package: str, strategy: Any, start_method: str) -> Any:
    """Return Lightning's launcher of the processes of a strategy.

    Args:
        package: ``"lightning.pytorch"`` or ``"pytorch_lightning"``.
        strategy: Of Lightning.
        start_method: ``"popen"`` runs the script again; the others are those of multiprocessing.
    """
    library = import_module(f"{package}.strategies.launchers")
    if start_method == "popen":
        cluster, count = strategy.cluster_environment, strategy.num_processes
        return library._SubprocessScriptLauncher(cluster, count, strategy.num_nodes)
    return library._MultiProcessingLauncher(strategy, start_method)


def synchronizes_batchnorm(strategy: Any) -> bool:
    """Return whether Lightning's Trainer got ``sync_batchnorm=True``, which it sets on its strategy only."""
    return strategy._layer_sync is not None  # it has no public name


def unwrap_optimizer(optimizer: Any) -> Any:
    """Return the optimizer of torch in a LightningOptimizer, or the optimizer itself."""
    return getattr(optimizer, "_optimizer", optimizer)
