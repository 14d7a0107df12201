"""Weights of ``from_pretrained``, read layer by layer into a model that is made sharded."""

from __future__ import annotations

import json
import logging
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dstrat.errors import MisuseError
from dstrat.parallel.meta_device import parameters_on_meta
from dstrat_transformers.initialization import assign, direct_parameters, names_of_parameters, shards_new_layers
from dstrat_transformers.models import (
    has_layers_of_other_dtype,
    is_pretrained_model,
    make_from_config,
    stored_parameters,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor
    from torch.nn import Module

    from dstrat_transformers.models import StoredParameter

_logger = logging.getLogger(__name__)

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
DOWNLOAD_OPTIONS = ("cache_dir", "force_download", "proxies", "token", "revision", "local_files_only", "subfolder")
_POSSIBLE = {*DOWNLOAD_OPTIONS, "dtype", "attn_implementation", "config"}
_ALTERNATIVE = "pass the model itself to HFModule, which each process then holds once in full before it is sharded"


def is_from_pretrained(factory: Callable[[], Module]) -> bool:
    """Return whether a function is ``partial(SomeModel.from_pretrained, "name")``."""
    function = factory.func if isinstance(factory, partial) else None
    return getattr(function, "__name__", "") == "from_pretrained" and isinstance(
        getattr(function, "__self__", None), type
    )


def load_pretrained(factory: Any) -> Module:
    """Return a model with its weights, of which each process reads its own shards where the strategy shards it.

    Args:
        factory: ``partial(SomeModel.from_pretrained, "name", ...)``.

    Raises:
        MisuseError: The files have other tensors than the model, or an argument is not possible here.
    """
    if not shards_new_layers():
        model: Module = factory()
        return model
    kwargs = dict(factory.keywords)
    name, *more = factory.args or (kwargs.pop("pretrained_model_name_or_path", None),)
    if more or (unknown := sorted(kwargs.keys() - _POSSIBLE)):
        refused = ", ".join(unknown) if not more else "more than the name"
        raise MisuseError(
            f"from_pretrained with {refused} is not possible where parameters are made sharded: {_ALTERNATIVE}"
        )
    download = {key: kwargs.pop(key) for key in DOWNLOAD_OPTIONS if key in kwargs}
    weights = PretrainedWeights(name, download)
    with parameters_on_meta():
        model = _make(factory.func.__self__, name, kwargs, download, weights)
    weights.fill_model(model)
    return model


def _make(cls: Any, name: Any, kwargs: dict[str, Any], download: Mapping[str, Any], weights: PretrainedWeights) -> Any:
    """Return the model without its weights."""
    from transformers import AutoConfig

    config = kwargs.pop("config", None) or AutoConfig.from_pretrained(name, **download)
    if getattr(config, "quantization_config", None) is not None:
        raise MisuseError(f"{str(name)!r} is quantized, and cannot be made sharded: {_ALTERNATIVE}")
    config.name_or_path = str(name)
    if kwargs.get("dtype", "auto") in ("auto", None):  # the default of transformers 5
        kwargs["dtype"] = config.dtype or weights.dtype
    model = make_from_config(cls, config, **kwargs)
    if not is_pretrained_model(model):
        raise MisuseError(f"{cls.__name__} made a {type(model).__name__}, not a PreTrainedModel: {_ALTERNATIVE}")
    if has_layers_of_other_dtype(model, kwargs["dtype"]):
        raise MisuseError(
            f"{type(model).__name__} in {kwargs['dtype']} has layers of another dtype, and cannot be made sharded: "
            f"{_ALTERNATIVE}; or load it with dtype=torch.float32"
        )
    if model.can_generate():
        _load_generation_config(model, name, download)
    return model


def _load_generation_config(model: Any, name: Any, download: Mapping[str, Any]) -> None:
    from transformers import GenerationConfig

    try:
        model.generation_config = GenerationConfig.from_pretrained(name, **download)
    except OSError:
        _logger.info("%s has no generation_config.json: it generates by its config", name)


class PretrainedWeights:
    """Files of safetensors in a folder, or on the Hub, of which tensors are read one by one.

    Args:
        name: The folder, or the name on the Hub.
        download: Arguments of ``from_pretrained`` for the Hub.

    Attributes:
        name: The folder or name.

    Raises:
        MisuseError: There are no such files.
    """

    def __init__(self, name: Any, download: Mapping[str, Any]) -> None:
        from transformers.utils import cached_file

        def find(file: str) -> Any:
            return cached_file(name, file, _raise_exceptions_for_missing_entries=False, **download)

        self.name = str(name)
        index = find(_INDEX)
        if index is not None:  # several files; of the single one there is no index
            by_key = json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"]
            paths = {file: find(file) for file in set(by_key.values())}
            self._paths = {key: paths[file] for key, file in by_key.items()}
            return
        path = find(_WEIGHTS)
        if path is None:
            raise MisuseError(f"{self.name!r} has no {_WEIGHTS} and no {_INDEX}: {_ALTERNATIVE}")
        from safetensors import safe_open

        with safe_open(path, framework="pt") as file:
            self._paths = dict.fromkeys(file.keys(), path)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the first tensor that has floating point, as ``from_pretrained`` takes it."""
        tensors = (self.read(key) for key in self._paths)
        return next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), torch.float32)

    def read(self, key: str, slices: tuple[slice, ...] = ()) -> Tensor:
        """Return one tensor, or a box of it, on the CPU."""
        from safetensors import safe_open

        with safe_open(self._paths[key], framework="pt") as file:
            tensor: Tensor = file.get_slice(key)[slices] if slices else file.get_tensor(key)
            return tensor

    def read_parameter(self, model: Module, stored: StoredParameter, slices: tuple[slice, ...] = ()) -> Tensor:
        """Return a parameter, or a box of it, on the CPU, without reading experts outside of the box.

        Args:
            model: The model.
            stored: Its tensors.
            slices: The box, a slice for each dimension; empty for all.
        """
        if stored.converter is None:
            ((key,),) = stored.keys.values()
            return self.read(key, slices)
        if slices and stored.has_tensors_of_rows:
            stored, slices = stored.of_rows(slices[0]), (slice(None), *slices[1:])
        tensors = {key: self.read(key) for keys in stored.keys.values() for key in keys}
        return stored.convert(model, tensors)[slices]

    def fill_model(self, model: Module) -> None:
        """Give a model its weights: now, or when a strategy shards the layers that have no memory yet.

        Raises:
            MisuseError: The files have other tensors than the model.
        """
        stored = self._matched(model, names_of_parameters(model))
        for layer in model.modules():
            parameters = direct_parameters(layer)
            of_layer = {name: stored[id(layer), name] for name in parameters}
            if any(parameter.is_meta for parameter in parameters.values()):
                # Strategies call one of these when they have given the layer memory.
                layer.reset_parameters = partial(self._fill, model, layer, of_layer)  # type: ignore[assignment]  # strategies call it
                layer.read_parameter = partial(self._read_box, model, of_layer)  # type: ignore[assignment]  # likewise
            else:
                self._fill(model, layer, of_layer)
        for key, buffer in model.named_buffers():
            if key in self._paths:
                buffer.data.copy_(self.read(key))

    def _matched(self, model: Module, names: Mapping[tuple[int, str], Any]) -> dict[tuple[int, str], StoredParameter]:
        """Return the tensors of each parameter in the files; of one that layers share, those that are there."""
        known = {alias for aliases, _ in names.values() for alias in aliases}
        stored = stored_parameters(model, known, self._paths.keys())
        outlines = self._outlines()
        shapes = {
            name: one.convert(model, {key: outlines[key] for keys in one.keys.values() for key in keys}).shape
            for name, one in stored.items()
            if name in known
        }
        matched: dict[tuple[int, str], StoredParameter] = {}
        for owner, (aliases, shape) in names.items():
            name = next((alias for alias in aliases if shapes.get(alias) == shape), None)
            if name is None:
                raise MisuseError(
                    f"{self.name!r} has no tensor {aliases[0]!r} of shape {tuple(shape)} for {type(model).__name__}, "
                    f"and it cannot be made sharded: {_ALTERNATIVE}"
                )
            self._check_source(model, stored[name])
            matched[owner] = stored[name]
        buffers = {key for key, _ in model.named_buffers()}
        used = {key for name in shapes for keys in stored[name].keys.values() for key in keys}
        # A warning, as in from_pretrained: a model without the head of the saved one is usual.
        if unused := sorted(self._paths.keys() - used - buffers):
            _logger.warning("%s has tensors that %s has not: %s", self.name, type(model).__name__, ", ".join(unused))
        return matched

    def _check_source(self, model: Module, stored: StoredParameter) -> None:
        """Refuse a parameter that is in the files under several names, such as an old one and a new one."""
        keys = [key for of_pattern in stored.keys.values() for key in of_pattern]
        if stored.converter is None and len(keys) > 1:
            tensors = " and ".join(f"{key!r} in {Path(self._paths[key]).name}" for key in keys)
            raise MisuseError(
                f"{self.name!r} has parameter {stored.name!r} of {type(model).__name__} more than once, as {tensors}: "
                "remove all of them but one"
            )

    def _outlines(self) -> dict[str, Tensor]:
        """Return tensors of the same shapes without values, by name."""
        from safetensors import safe_open

        with ExitStack() as stack:
            files = {path: stack.enter_context(safe_open(path, framework="pt")) for path in set(self._paths.values())}
            shapes = {key: files[path].get_slice(key).get_shape() for key, path in self._paths.items()}
        return {key: torch.empty(shape, device="meta") for key, shape in shapes.items()}

    @torch.no_grad()
    def _fill(self, model: Module, layer: Module, stored: Mapping[str, StoredParameter]) -> None:
        for name, one in stored.items():
            assign(layer, name, self.read_parameter(model, one))

    def _read_box(
        self, model: Module, stored: Mapping[str, StoredParameter], name: str, slices: tuple[slice, ...]
    ) -> Tensor:
        return self.read_parameter(model, stored[name], slices)
