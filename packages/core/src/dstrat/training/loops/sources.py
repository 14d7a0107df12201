"""Data sources of a run: passed loaders, a data module, or the module's hooks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from dstrat.data.combined_loader import is_structure, leaves
from dstrat.data.loaders import check_loaders
from dstrat.errors import MisuseError
from dstrat.training.hooks import check_no_removed_hooks, hook_of, overrides
from dstrat.training.module.data_module import DataModule
from dstrat.training.module.hooks import DataHooks
from dstrat.training.module.train_module import TrainModule

if TYPE_CHECKING:
    from collections.abc import Mapping

Source = Literal["train", "val", "test", "predict"]


class DataSources:
    """The loaders of a run.

    Args:
        module: Its own loader hooks are used where nothing else is given.
        datamodule: Its loader hooks come first.
        passed: Loaders that were passed to the Trainer's method, by source; they come before everything else.
    """

    def __init__(self, module: TrainModule, datamodule: DataModule | None, passed: Mapping[Source, Any]) -> None:
        _check_module(module)
        check_no_removed_hooks(module)
        self._module = module
        self._passed = {source: loaders for source, loaders in passed.items() if loaders is not None}
        for source, loaders in list(self._passed.items()):
            if isinstance(loaders, DataModule) and datamodule is None:  # given where the loaders are expected
                datamodule = self._passed.pop(source)
        for candidate in (datamodule, *self._passed.values()):
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
        """Return whether there is a loader; an empty list is none."""
        if source in self._passed:
            return not _is_empty(self._passed[source])
        return self._owner(source) is not None

    def has_step(self, name: str) -> bool:
        """Return whether the module implements a step."""
        return overrides(self._module, name, TrainModule)

    def require(self, source: Source, step: str) -> None:
        """Raise MisuseError unless the module has the step and there is a loader for it."""
        name = type(self._module).__name__
        is_needed = step != "predict_step" or getattr(self._module, step) is None
        if is_needed and not self.has_step(step):
            _raise_missing(self._module, step)
        if source in self._passed:
            _check_any(self._passed[source], f"what was passed as the {source} loader")
        elif not self.has(source):
            raise MisuseError(
                f"there is no {source} loader: pass one, pass a datamodule, or define {name}.{source}_dataloader"
            )

    def require_optimizers(self) -> None:
        """Raise MisuseError unless the module configures its optimizers."""
        if not overrides(self._module, "configure_optimizers", TrainModule):
            _raise_missing(self._module, "configure_optimizers")

    def loader(self, source: Source, *, may_be_none: bool = False) -> Any:
        """Return the loader, or the structure of them.

        Args:
            source: Which.
            may_be_none: Whether a hook may return None, or a structure without a loader.

        Raises:
            MisuseError: What a hook returned is no loader.
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
        return self._module if overrides(self._module, name, TrainModule) else None

    def passed(self, source: Source) -> Any:
        """Return the loaders that were passed; None where a hook makes them."""
        return self._passed.get(source)

    def arguments(self, stage: str) -> dict[str, Any]:
        """Return what another Trainer's method takes to read the same data, but for the module."""
        if stage == "fit":
            loaders = {"train_dataloaders": self.passed("train"), "val_dataloaders": self.passed("val")}
        else:
            loaders = {"dataloaders": next(iter(self._passed.values()), None)}
        return {**loaders, "datamodule": self.datamodule}

    def prepare_data(self) -> None:
        """Call the hooks that download data."""
        for owner in self._owners:
            hook_of(owner, "prepare_data", DataHooks)()

    @property
    def _owners(self) -> list[DataModule | TrainModule]:
        return [owner for owner in (self.datamodule, self._module) if owner is not None]


def _raise_missing(module: TrainModule, name: str) -> None:
    if name == "predict_step":
        raise MisuseError(f"{type(module).__name__}.predict_step is None: define it, or leave it as it is")
    getattr(TrainModule, name)(module)  # which says what to define


def _is_empty(loaders: Any) -> bool:
    return loaders is None or (is_structure(loaders) and not list(leaves(loaders)))


def _check_any(loaders: Any, origin: str) -> None:
    if _is_empty(loaders):
        raise MisuseError(f"{origin} is {loaders!r}, which has no loader: pass a DataLoader, or a list or dict of them")


def _check_datamodule(candidate: Any) -> None:
    """Raise MisuseError where a data module is one of another library."""
    kind = type(candidate)
    if not isinstance(candidate, DataModule) and callable(getattr(candidate, "train_dataloader", None)):
        raise MisuseError(
            f"{kind.__name__} (of {kind.__module__.partition('.')[0]}) is a data module of another library: derive it "
            "from dstrat.DataModule, or pass the loaders that its hooks return, such as "
            "train_dataloaders=datamodule.train_dataloader()"
        )


def _check_module(module: Any) -> None:
    if isinstance(module, TrainModule):
        return
    if isinstance(getattr(module, "_orig_mod", None), TrainModule):  # what torch.compile makes of one
        raise MisuseError(
            "torch.compile(module) wraps the module, and its steps would run uncompiled: call module.compile() and "
            "pass the module itself"
        )
    raise MisuseError(
        f"{type(module).__name__} is not a TrainModule: derive it from dstrat.TrainModule, "
        "which is an nn.Module with training_step and configure_optimizers"
    )
