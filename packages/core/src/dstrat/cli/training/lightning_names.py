"""Translation of Lightning's names in configuration files."""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from typing import Any

from dstrat.errors import RequestError
from dstrat.plugins.settings import nearest

RENAMED = {
    "BasePredictionWriter": "PredictionWriter",
    "LightningDataModule": "DataModule",
    "LightningEnvironment": "LocalEnvironment",
    "LightningModule": "TrainModule",
    "PyTorchProfiler": "TorchProfiler",
    "RichModelSummary": "ModelSummary",
}
"""Classes that have another name here."""

INSTEAD = {
    "DoublePrecision": "write precision: 64-true",
    "HalfPrecision": "write precision: 16-true or bf16-true",
    "LayerSync": "write sync_batchnorm: true",
    "PassThroughProfiler": "write profiler: null",
    "TorchSyncBatchNorm": "write sync_batchnorm: true",
}
"""Classes without a counterpart, each with a hint."""

PRECISION_INSTEAD = "write precision: bf16-mixed or another flag"
"""Hint for a precision of Lightning that belongs to one strategy."""

_HOMES = ("callbacks", "loggers", "profilers", "strategies", "accelerators", "plugins", "plugins.precision")
_MORE_HOMES = ("plugins.io", "plugins.environments", "cli")
_CLASS_PATH = re.compile(
    r"(?:lightning\.pytorch|lightning\.fabric|pytorch_lightning|lightning_fabric|lightning)(?:\.[a-z_]\w*)*\.([A-Z]\w*)"
)
_STRATEGY_CLASS = re.compile(r"[A-Z]\w*Strategy")

# Arguments of Lightning's Trainer that a saved configuration lists, with the values that change nothing.
_UNUSED = {"enable_autolog_hparams": True, "model_registry": None}

_translated: dict[str, str] = {}  # of the current command line, until take_translations reports them


def translate(value: Any) -> Any:
    """Return a part of a configuration with dstrat's names for classes of Lightning.

    Raises:
        RequestError: A class has no counterpart.
        NotInstalledError: Its package is not installed.
    """
    if isinstance(value, str):
        return _class_path(value)
    if isinstance(value, list):
        return [translate(item) for item in value]
    if not isinstance(value, dict):
        return value
    translated = {key: translate(item) for key, item in value.items()}
    if isinstance(translated.get("trainer"), dict):
        translated["trainer"] = _without_defaults(translated["trainer"])
    return _class_spec(translated) if isinstance(translated.get("class_path"), str) else translated


def translate_argument(argument: str) -> str:
    """Return an argument of a command line, ``--name=value`` or a value, with dstrat's name of a class."""
    name, equals, value = argument.rpartition("=")
    return f"{name}{equals}{_class_path(value)}"


def take_translations() -> dict[str, str]:
    """Return dstrat's names by Lightning's, of the translations since the last call."""
    translations = dict(_translated)
    _translated.clear()
    return translations


def _class_path(text: str) -> str:
    match = _CLASS_PATH.fullmatch(text)
    if match is None:
        return text
    name = RENAMED.get(match[1], match[1])
    homes = [import_module(f"dstrat.{home}") for home in (*_HOMES, *_MORE_HOMES)]
    for home in (*homes, import_module("dstrat")):
        if hasattr(home, name):
            _translated[text] = f"{home.__name__}.{name}"
            return _translated[text]
    instead = INSTEAD.get(name) or (PRECISION_INSTEAD if name.endswith("Precision") else None)
    if instead is not None:
        raise RequestError(f"class {text!r} has no counterpart in dstrat: {instead}")
    near = nearest(name, [other for home in homes for other in dir(home) if other[:1].isupper()])
    meant = f"; did you mean {' or '.join(map(repr, near))}?  Otherwise" if near else ":"
    raise RequestError(
        f"class {text!r} has no counterpart in dstrat{meant} leave it out, or name a class derived from dstrat's own"
    )


def _without_defaults(trainer: dict[str, Any]) -> dict[str, Any]:
    """Return arguments of the Trainer without those of Lightning alone that have their defaults."""
    unused = [name for name, default in _UNUSED.items() if name in trainer and trainer[name] == default]
    _translated.update(dict.fromkeys((f"trainer.{name}" for name in unused), "nothing, as it has its default"))
    return {name: value for name, value in trainer.items() if name not in unused}


def _class_spec(spec: dict[str, Any]) -> dict[str, Any]:
    """Return the specification of an object; options that a class takes by ``**options`` go to ``dict_kwargs``."""
    path = spec["class_path"]
    # jsonargparse finds a bare name among imported classes only, and those of strategies are not.
    if _STRATEGY_CLASS.fullmatch(path) and hasattr(import_module("dstrat.strategies"), path):
        path = f"dstrat.strategies.{path}"
    spec = {**spec, "class_path": path}
    options = spec.get("init_args")
    module, _, name = path.rpartition(".")
    if module.startswith("dstrat.") and isinstance(options, dict):
        named = _named_options(getattr(import_module(module), name))
        spec["init_args"] = {name: value for name, value in options.items() if named is None or name in named}
        passed_on = {name: value for name, value in options.items() if name not in spec["init_args"]}
        if passed_on:
            spec["dict_kwargs"] = {**passed_on, **spec.get("dict_kwargs", {})}
    return spec


def _named_options(cls: type) -> set[str] | None:
    """Return the options of a class that jsonargparse knows by name; None if the class takes no others."""
    from jsonargparse import ArgumentParser

    parameters = inspect.signature(cls).parameters.values()
    if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return {name.partition(".")[2] for name in ArgumentParser().add_class_arguments(cls, "of", fail_untyped=False)}
