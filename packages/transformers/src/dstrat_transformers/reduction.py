"""Models of transformers with fewer layers."""

from __future__ import annotations

import copy
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from dstrat_transformers.models import base_model, constructor_of
from dstrat_transformers.pretrained import DOWNLOAD_OPTIONS, is_from_pretrained

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.nn import Module

_COUNTS = ("num_hidden_layers", "num_layers", "num_decoder_layers", "encoder_layers", "decoder_layers")


def keep_config_layers(config: Any, count: int, prefix: str = "config") -> dict[str, tuple[int, int]]:
    """Change a config and those inside of it to at most a number of layers.

    Args:
        config: The config.
        count: The number.
        prefix: Its name, before those of its attributes.

    Returns:
        The numbers before and after, by name.
    """
    reduced: dict[str, tuple[int, int]] = {}
    for name in _COUNTS:
        before = getattr(config, name, None)
        if not isinstance(before, int) or before <= count:
            continue
        setattr(config, name, count)
        for key, value in list(vars(config).items()):
            if "layer" in key and isinstance(value, list) and len(value) == before:  # such as layer_types
                setattr(config, key, value[:count])
        reduced[f"{prefix}.{name}"] = before, count
    for name in config.sub_configs:
        inner = getattr(config, name, None)
        if inner is not None:
            reduced |= keep_config_layers(inner, count, f"{prefix}.{name}")
    return reduced


def keep_model_layers(model: Module, count: int) -> dict[str, tuple[int, int]]:
    """Remove layers of a model but for the first ones, and change its config.

    Args:
        model: The model.
        count: Number of layers that stay, of each list as long as the config says.

    Returns:
        The numbers before and after, by name.
    """
    inner = base_model(model)
    reduced = keep_config_layers(inner.config, count)
    numbers = {before for before, _ in reduced.values()}
    blocks: tuple[str, ...] = ()
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.ModuleList) and not name.startswith(blocks):  # lists inside may be of experts
            blocks += (f"{name}.",)
            if len(layer) in numbers:
                reduced[f"model.{name}"] = len(layer), count
                del layer[count:]
    return reduced


def keep_made_layers(
    factory: Callable[[], Module], count: int
) -> tuple[Callable[[], Module], dict[str, tuple[int, int]]] | None:
    """Return a function that makes a model with fewer layers, and the numbers before and after, by name.

    Weights of ``from_pretrained`` are not read: the model is a new one of their config.

    Args:
        factory: ``functools.partial`` of a class or function of transformers, with a config or the name of one.
        count: Number of layers.

    Returns:
        None for another function, whose config is not known before it is called.
    """
    if not isinstance(factory, partial):
        return None
    if is_from_pretrained(factory):
        return _reduce_pretrained(factory, count)
    arguments = [*factory.args, *factory.keywords.values()]
    configs = {id(value): copy.deepcopy(value) for value in arguments if hasattr(value, "sub_configs")}
    reduced: dict[str, tuple[int, int]] = {}
    for config in configs.values():
        reduced |= keep_config_layers(config, count)
    args = [configs.get(id(value), value) for value in factory.args]
    kwargs = {name: configs.get(id(value), value) for name, value in factory.keywords.items()}
    return (partial(factory.func, *args, **kwargs), reduced) if configs else None


def _reduce_pretrained(factory: Any, count: int) -> tuple[Callable[[], Module], dict[str, tuple[int, int]]]:
    from transformers import AutoConfig

    kwargs = dict(factory.keywords)
    name = factory.args[0] if factory.args else kwargs.pop("pretrained_model_name_or_path", None)
    download = {key: kwargs.pop(key) for key in DOWNLOAD_OPTIONS if key in kwargs}
    config = copy.deepcopy(kwargs.pop("config", None)) or AutoConfig.from_pretrained(name, **download)
    reduced = keep_config_layers(config, count)
    if kwargs.get("dtype") == "auto":
        del kwargs["dtype"]  # then that of the config
    return partial(constructor_of(factory.func.__self__), config, **kwargs), reduced
