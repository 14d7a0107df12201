"""Data sources of a run: passed loaders, a data module, or the module's hooks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from dstrat.data.combined_loader import is_structure, leaves
from dstrat.data.loaders import check_loaders
from dstrat.errors import MisuseError
from dstrat.training.arguments import adapt, install_hint
from dstrat.training.hooks import check_no_removed_hooks, hook_of, overrides
from dstrat.training.module.compiling import wrapped_module
from dstrat.training.module.data_module import DataModule
from dstrat.training.module.hooks import DataHooks
from dstrat.training.module.train_module import TrainModule

if TYPE_CHECKING:
    from collections.abc import Mapping

Source = Literal["train", "val", "test", "predict"]


class DataSources:
    """The sources of a run's loaders.

    Loaders passed to the Trainer's method come first, then the hooks of the data module, then those of the module.

    Args:
        module: The user's module.
        datamodule: The user's data module; None without one.
        passed: The loaders passed to the Trainer's method, by source.

    Attributes:
        module: The module, converted if it is another library's.
        datamodule: The data module, converted likewise; None without one.
    """

    def __init__(self, module: TrainModule, datamodule: DataModule | None, passed: Mapping[Source, Any]) -> None:
        module = adapt(module, TrainModule)
        _check_module(module)
        check_no_removed_hooks(module)
        self.module = module
        self._passed = {source: loaders for source, loaders in passed.items() if loaders is not None}
        datamodule = adapt(datamodule, DataModule)
        for source, loaders in list(self._passed.items()):
            loaders = adapt(loaders, DataModule)  # noqa: PLW2901 - the same one, converted
            if isinstance(loaders, DataModule) and datamodule is None:  # fit(module, datamodule) by position
                del self._passed[source]
                datamodule = loaders
        for candidate in (datamodule, *self._passed.values()):  # loaders too: a data module may be passed by position
            _check_datamodule(candidate)
        self.datamodule = datamodule
        check_no_removed_hooks(datamodule)
        if datamodule is not None and self._passed:
            raise MisuseError(
                f"loaders were passed for {', '.join(self._passed)}, and a datamodule too: pass one or the other"
            )
        for source, loaders in self._passed.items():
            check_loaders(loaders, f"the {source} loader")

    def has(self, source: Source) -> bool:
        """Return whether a source has a loader; an empty list has none."""
        if source in self._passed:
            return not _is_empty(self._passed[source])
        return self._owner(source) is not None

    def has_step(self, name: str) -> bool:
        """Return whether the module implements a step."""
        return overrides(self.module, name, TrainModule)

    def require(self, source: Source, step: str) -> None:
        """Raise a MisuseError unless the module has a step, and the source a loader."""
        name = type(self.module).__name__
        # TrainModule has a predict_step, but a user may set it to None.
        is_needed = step != "predict_step" or getattr(self.module, step) is None
        if is_needed and not self.has_step(step):
            _raise_missing(self.module, step)
        if source in self._passed:
            _check_any(self._passed[source], f"what was passed as the {source} loader")
        elif not self.has(source):
            raise MisuseError(
                f"there is no {source} loader: pass one, pass a datamodule, or define {name}.{source}_dataloader"
            )

    def require_optimizers(self) -> None:
        """Raise a MisuseError unless the module overrides ``configure_optimizers``."""
        if not overrides(self.module, "configure_optimizers", TrainModule):
            _raise_missing(self.module, "configure_optimizers")

    def loader(self, source: Source, *, may_be_none: bool = False) -> Any:
        """Return the loader, or the structure of loaders, of a source.

        Args:
            source: The source.
            may_be_none: Whether a hook may return None, or a structure without a loader.

        Raises:
            MisuseError: A hook returned something that is not a loader.
        """
        if source in self._passed:
            return self._passed[source]
        owner = self._owner(source)
        loaders = getattr(owner, f"{source}_dataloader")()
        origin = f"what {type(owner).__name__}.{source}_dataloader returned"
        if not may_be_none:
            _check_any(loaders, origin)
        if loaders is not None:
            check_loaders(loaders, origin)
        return loaders

    def _owner(self, source: Source) -> DataModule | TrainModule | None:
        name = f"{source}_dataloader"
        if self.datamodule is not None and overrides(self.datamodule, name, DataModule):
            return self.datamodule
        return self.module if overrides(self.module, name, TrainModule) else None

    def passed(self, source: Source) -> Any:
        """Return the loaders passed to the Trainer's method; None if a hook makes them."""
        return self._passed.get(source)

    def arguments(self, stage: str) -> dict[str, Any]:
        """Return the arguments, except the module, with which another Trainer's method reads the same data."""
        if stage == "fit":
            loaders = {"train_dataloaders": self.passed("train"), "val_dataloaders": self.passed("val")}
        else:
            loaders = {"dataloaders": next(iter(self._passed.values()), None)}
        return {**loaders, "datamodule": self.datamodule}

    def prepare_data(self) -> None:
        """Call the hooks that download data."""
        for owner in (self.datamodule, self.module):
            if owner is not None:
                hook_of(owner, "prepare_data", DataHooks)()


def _raise_missing(module: TrainModule, name: str) -> None:
    if name == "predict_step":
        raise MisuseError(f"{type(module).__name__}.predict_step is None: define it, or leave it as it is")
    getattr(TrainModule, name)(module)  # the base class raises the error


def _is_empty(loaders: Any) -> bool:
    return loaders is None or (is_structure(loaders) and not list(leaves(loaders)))


def _check_any(loaders: Any, origin: str) -> None:
    if _is_empty(loaders):
        raise MisuseError(f"{origin} is {loaders!r}, which has no loader: pass a DataLoader, or a list or dict of them")


def _check_datamodule(candidate: Any) -> None:
    """Raise a MisuseError for a data module of another library."""
    kind = type(candidate)
    if not isinstance(candidate, DataModule) and callable(getattr(candidate, "train_dataloader", None)):
        raise MisuseError(
            f"{kind.__name__} (of {kind.__module__.partition('.')[0]}) is a data module of another library: derive it "
            "from dstrat.DataModule, or pass the loaders that its hooks return, such as "
            f"train_dataloaders=datamodule.train_dataloader(){install_hint(candidate)}"
        )


def _check_module(module: Any) -> None:
    if isinstance(module, TrainModule):
        return
    if isinstance(wrapped_module(module), TrainModule):
        raise MisuseError(
            "torch.compile(module) wraps the module, and its steps would run uncompiled: call module.compile() and "
            "pass the module itself"
        )
    raise MisuseError(
        f"{type(module).__name__} is not a TrainModule: derive it from dstrat.TrainModule, "
        f"which is an nn.Module with training_step and configure_optimizers{install_hint(module)}"
    )
