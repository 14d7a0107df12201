"""Record Lightning's public names in lightning_names.json; run where the Lightning in question is installed.

python tests/record_lightning_names.py
"""

from __future__ import annotations

import inspect
import json
import logging
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

RECORD = Path(__file__).with_name("lightning_names.json")
_BASES = ("Strategy", "Precision", "ClusterEnvironment", "CheckpointIO")  # whose members users override, too


def arguments(function: Any) -> dict[str, str]:
    """Return the arguments of a function, and for each the text of its default, or "required".

    The name "*" stands before those that can only be passed by name.
    """
    parameters = list(inspect.signature(function).parameters.values())
    if parameters and parameters[0].name in ("self", "cls"):
        del parameters[0]
    found = {}
    for parameter in parameters:
        if parameter.kind is parameter.KEYWORD_ONLY:
            found.setdefault("*", "any")
        found[str(parameter).partition(":")[0].partition("=")[0].strip()] = _default(parameter)
    return found


def _default(parameter: inspect.Parameter) -> str:
    if parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
        return "any"
    default = parameter.default
    if default is inspect.Parameter.empty:
        return "required"
    default = getattr(default, "value", default)  # of an enum
    return repr(default) if " at 0x" not in repr(default) else type(default).__name__


def record(kind: type, instance: object, inherited: set[str]) -> dict[str, Any]:
    """Return the arguments of a class and its methods, and its other attributes."""
    methods, attributes = {}, []
    for name in sorted(set(dir(kind)) | set(vars(instance)) - inherited):
        if name.startswith("_") or name in inherited:
            continue
        member = inspect.getattr_static(kind, name, None)
        if inspect.isroutine(member) or isinstance(member, (classmethod, staticmethod)):
            methods[name] = arguments(getattr(kind, name))
        else:
            attributes.append(name)
    return {"arguments": arguments(kind), "methods": methods, "attributes": attributes}


def main() -> None:
    """Write what the installed Lightning has."""
    import lightning.pytorch as pl
    import torch
    from lightning.pytorch import accelerators, callbacks, loggers, plugins, profilers, strategies
    from lightning.pytorch.plugins import environments

    warnings.simplefilter("ignore")
    logging.disable()
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    of_modules = set(dir(torch.nn.Module)) | set(vars(torch.nn.Module()))
    names: dict[str, Any] = {
        "Trainer": record(pl.Trainer, trainer, set()),
        "LightningModule": record(pl.LightningModule, pl.LightningModule(), of_modules),
        "LightningDataModule": record(pl.LightningDataModule, pl.LightningDataModule(), set()),
        "Callback": record(pl.Callback, pl.Callback(), set()),
    }
    for home in (callbacks, loggers, profilers, strategies, accelerators, plugins, environments):
        public = getattr(home, "__all__", [name for name in vars(home) if name[0].isupper()])
        for name in sorted({*public} - names.keys()):
            kind = getattr(home, name)
            names[name] = {"arguments": arguments(kind)}
            if home in (callbacks, loggers, profilers) or name in _BASES:
                inherited = dir(callbacks.Callback) if home is callbacks else ()
                members = {member for member in dir(kind) if not member.startswith("_")}
                names[name]["members"] = sorted(members.difference(inherited))
    text = json.dumps({"lightning": version("lightning"), "names": names}, indent=1)
    RECORD.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
