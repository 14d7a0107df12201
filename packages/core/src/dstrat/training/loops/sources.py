"""Data sources of a run: passed loaders, a data module, or the module's hooks."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Literal

from dstrat.data.combined_loader import is_structure, leaves
from dstrat.data.loaders import check_loaders
from dstrat.errors import MisuseError
from dstrat.plugins.settings import nearest
from dstrat.training.arguments import adapt, install_hint
from dstrat.training.hooks import check_no_removed_hooks, hook_of, methods_beside, overrides
from dstrat.training.module.compiling import wrapped_module
from dstrat.training.module.data_module import DataModule
from dstrat.training.module.hooks import DataHooks
from dstrat.training.module.train_module import TrainModule

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dstrat.training.run import Stage

Source = Literal["train", "val", "test", "predict"]
Purpose = Literal["validation", "test", "predict"]

SOURCES: dict[Stage, Source] = {"fit": "train", "validate": "val", "test": "test", "predict": "predict"}
"""Source of the loader that each method of the Trainer reads; a fit validates with ``"val"`` too."""
PURPOSES: dict[Source, Purpose] = {"val": "validation", "test": "test", "predict": "predict"}
"""Name of an evaluation in its step and hooks, by the source of its loaders."""

_SURE = 0.9  # similarity of a misspelled step or loader; "evaluation_step" and "make_dataloader" have less
_LIKELY = 0.75  # similarity of what may be one, or a method of the user's own
_MISSPELLINGS = {
    "validation_step": ("val_step", "valid_step"),
    "val_dataloader": ("validation_dataloader",),
}
"""Names that are not similar enough, and hardly anything else."""

_log = logging.getLogger(__name__)


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
        return self._owner_of(f"{source}_dataloader") is not None

    def has_step(self, name: str) -> bool:
        """Return whether the module implements a step."""
        return overrides(self.module, name, TrainModule)

    def require(self, source: Source, step: str) -> None:
        """Raise a MisuseError unless the module has a step, and the source a loader."""
        name = type(self.module).__name__
        # TrainModule has a predict_step, but a user may set it to None.
        is_needed = step != "predict_step" or getattr(self.module, step) is None
        if is_needed and not self.has_step(step):
            self._raise_missing(step)
        if source in self._passed:
            _check_any(self._passed[source], f"what was passed as the {source} loader")
        elif not self.has(source):
            raise MisuseError(
                f"there is no {source} loader: pass one, pass a datamodule, or define {name}.{source}_dataloader"
                f"{self._meant(f'{source}_dataloader')}"
            )

    def require_optimizers(self) -> None:
        """Raise a MisuseError unless the module overrides ``configure_optimizers``."""
        if not overrides(self.module, "configure_optimizers", TrainModule):
            self._raise_missing("configure_optimizers")

    def validates(self, *, warns: bool = False) -> bool:
        """Return whether a fit can validate: there are a loader and a step.

        Args:
            warns: Whether to log a warning about one of the two that is missing.

        Raises:
            MisuseError: One of the two is missing, and a method is surely meant to be it.
        """
        name = type(self.module).__name__
        has_loader, has_step = self.has("val"), self.has_step("validation_step")
        if has_loader and not has_step:
            if meant := self._meant("validation_step", least=_SURE):
                raise MisuseError(
                    f"there is a val loader, and {name} has no validation_step{meant}; limit_val_batches=0 turns "
                    "validation off"
                )
            if warns:
                _log.warning(
                    "there is a val loader, and %s has no validation_step%s: the fit does not validate",
                    *(name, self._meant("validation_step")),
                )
        if has_step and "val" not in self._passed:
            if meant := self._meant("val_dataloader", least=_SURE):
                raise MisuseError(
                    f"{name} has a validation_step, and there is no val_dataloader{meant}; limit_val_batches=0 turns "
                    "validation off"
                )
            if warns and (meant := self._meant("val_dataloader", least=_LIKELY)):
                _log.warning(
                    "%s has a validation_step, and there is no val_dataloader%s: the fit does not validate",
                    *(name, meant),
                )
        return has_loader and has_step

    def warn_of_default_predictions(self) -> None:
        """Log a warning if the module has no ``predict_step``, and a method may be meant to be it."""
        if not self.has_step("predict_step") and (meant := self._meant("predict_step", least=_LIKELY)):
            _log.warning(
                "%s has no predict_step%s: predictions are the results of forward", type(self.module).__name__, meant
            )

    def _meant(self, hook: str, **options: float) -> str:
        """Return the end of a message: a method of module or data module with almost the name of a hook."""
        if self._owner_of(hook):
            return ""
        near: set[str] = set()
        for owner, base in self._owners:
            names = methods_beside(owner, base)
            known = [name for name in _MISSPELLINGS.get(hook, ()) if name in names]
            near |= {f"{type(owner).__name__}.{name}" for name in known or nearest(hook, names, count=1, **options)}
        return f" (did you mean it by {' or '.join(sorted(near))}?)" if near else ""

    def _raise_missing(self, name: str) -> None:
        if name == "predict_step":
            raise MisuseError(f"{type(self.module).__name__}.predict_step is None: define it, or leave it as it is")
        try:
            getattr(TrainModule, name)(self.module)  # the base class raises the error
        except MisuseError as error:
            raise MisuseError(f"{error}{self._meant(name)}") from None

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
        owner = self._owner_of(f"{source}_dataloader")
        loaders = getattr(owner, f"{source}_dataloader")()
        origin = f"what {type(owner).__name__}.{source}_dataloader returned"
        if not may_be_none:
            _check_any(loaders, origin)
        if loaders is not None:
            check_loaders(loaders, origin)
        return loaders

    @property
    def _owners(self) -> list[tuple[Any, type]]:
        """The objects with hooks, each with its base class; the data module first."""
        of_data: list[tuple[Any, type]] = [] if self.datamodule is None else [(self.datamodule, DataModule)]
        return [*of_data, (self.module, TrainModule)]

    def _owner_of(self, hook: str) -> Any:
        return next((owner for owner, base in self._owners if overrides(owner, hook, base)), None)

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


def _is_empty(loaders: Any) -> bool:
    return loaders is None or (is_structure(loaders) and not list(leaves(loaders)))


def _check_any(loaders: Any, origin: str) -> None:
    if _is_empty(loaders):
        raise MisuseError(f"{origin} is {loaders!r}, which has no loader: pass a DataLoader, or a list or dict of them")


def _check_datamodule(candidate: Any) -> None:
    """Raise a MisuseError for a data module of another library."""
    if isinstance(candidate, type) and issubclass(candidate, DataModule):
        raise MisuseError(
            f"the class {candidate.__name__} was passed as data: pass an instance, {candidate.__name__}()"
        )
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
    if isinstance(module, type):
        raise MisuseError(
            f"the class {module.__name__} was passed as the module: pass an instance, {module.__name__}()"
        )
    if isinstance(wrapped_module(module), TrainModule):
        raise MisuseError(
            "torch.compile(module) wraps the module, and its steps would run uncompiled: call module.compile() and "
            "pass the module itself"
        )
    raise MisuseError(
        f"{type(module).__name__} is not a TrainModule: derive it from dstrat.TrainModule, "
        f"which is an nn.Module with training_step and configure_optimizers{install_hint(module)}"
    )
