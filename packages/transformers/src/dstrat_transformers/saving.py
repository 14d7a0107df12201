"""Folders for ``from_pretrained``, written in a run of any strategy."""

from __future__ import annotations

import json
import logging
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dstrat import Callback, WeightAveraging
from dstrat.errors import ConflictError, MisuseError
from dstrat.parallel.full_state import gather_state
from dstrat_transformers.models import (
    has_added_adapters,
    is_peft,
    is_pretrained_model,
    is_remote_code,
    learns_prompts,
    stored_tensors,
    unsaved_names,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch.nn import Module

    from dstrat import Trainer, TrainModule
    from dstrat.interfaces.strategy import Strategy

_logger = logging.getLogger(__name__)

DEFAULT_SHARD_SIZE = 5_000_000_000
"""Bytes of a file of weights, beyond which there are several."""

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"


def save_pretrained(
    module: Module,
    folder: str | Path,
    *,
    strategy: Strategy | None = None,
    max_shard_size: int = DEFAULT_SHARD_SIZE,
) -> None:
    """Write a model for ``from_pretrained``, or the adapters of a model of peft; collective.

    Rank 0 gathers one tensor after the other, and writes a file as soon as it is full, so that it holds at most
    ``max_shard_size`` beside its own share.  Models whose files have other tensors than the module, such as fused
    experts, are gathered as a whole on the CPU of rank 0.

    Args:
        module: The model, or the HFModule with it.
        folder: The folder, which is made; files of an earlier save are written over.
        strategy: The strategy in whose run the model is; None outside of a run, where only rank 0 of the last one
            writes.
        max_shard_size: Largest size of a file of weights, in bytes, unless one tensor is larger.

    Raises:
        MisuseError: Outside of a run, and this process has only shards of the parameters.
        ConflictError: The model has prompts that peft computes from parameters, and these are sharded.
    """
    is_model = is_pretrained_model(module) or is_peft(module)
    model: Any = module if is_model else getattr(module, "model", module)
    if strategy is not None and not strategy.replicates_state and learns_prompts(model):
        raise ConflictError(
            f"peft computes the prompts that it saves from whole parameters, and {type(strategy).__name__} has shards "
            "of them: choose 'ddp'"
        )
    prefix = "" if model is module else "model."
    gather = _Gathering(strategy, module)
    state = {name.removeprefix(prefix): value for name, value in gather.state.items()}
    folder = Path(folder)
    if gather.writes:
        folder.mkdir(parents=True, exist_ok=True)
    # Gathered tied weights no longer share memory, by which transformers would leave the second one out.
    unsaved = unsaved_names(model) if is_pretrained_model(model) else set()
    saved = {name: value for name, value in state.items() if name not in unsaved}
    if is_peft(model):
        _save_adapters(model, state, folder, gather)
    elif _is_stored_as_it_is(model, state):
        _save_weights(model, saved, folder, gather, max_shard_size)
    else:
        full = gather.all(saved)
        if gather.writes:
            model.save_pretrained(folder, state_dict=full, max_shard_size=max_shard_size)
    gather.barrier()


class _Gathering:
    """Full tensors of a module on rank 0, in a run or outside of one.

    Attributes:
        state: This rank's state of the module.
        writes: Whether this rank gets the full tensors, and writes them.
    """

    def __init__(self, strategy: Strategy | None, module: Module) -> None:
        self._strategy = strategy
        if strategy is not None:
            # With a pipeline other ranks have the other layers, and rank 0 gets all of them at once.
            is_staged = any(parameter.is_meta for parameter in module.parameters())
            self.state: Mapping[str, Any] = (
                strategy.module_state_dict() if is_staged else strategy.sharded_module_state()
            )
            self.writes = strategy.is_global_zero
            return
        # After a run an HFModule still has the rank; a model of transformers is that of a single process.
        self.writes = getattr(module, "global_rank", 0) == 0
        if self.writes and any(p.is_meta or isinstance(p, DTensor) for p in module.parameters()):
            raise MisuseError(
                f"the run has ended, and this process has only shards of {type(module).__name__}: save in the run, by "
                "the callback dstrat_transformers.PretrainedCheckpoint"
            )
        self.state = module.state_dict() if self.writes else {}

    def one(self, name: str, value: Any) -> Tensor | None:
        """Return a full tensor on rank 0, and None on the other ranks; collective."""
        if self._strategy is None:
            return value  # type: ignore[no-any-return]  # a tensor
        if isinstance(value, Tensor) and not isinstance(value, DTensor):  # replicated: no communication
            return value if self.writes else None
        return gather_state({name: value}, self._strategy).get(name)

    def all(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the full state on rank 0, and an empty dict on the other ranks; collective."""
        full = {name: self.one(name, value) for name, value in state.items()}
        return full if self.writes else {}

    def broadcast(self, value: Any) -> Any:
        """Return the value of rank 0; collective."""
        return value if self._strategy is None else self._strategy.broadcast(value)

    def barrier(self) -> None:
        """Wait until rank 0 has written."""
        if self._strategy is not None:
            self._strategy.barrier("save_pretrained")


def _is_stored_as_it_is(model: Any, state: Mapping[str, Any]) -> bool:
    """Return whether the files of a model have the tensors of its state, under the same names."""
    if not is_pretrained_model(model) or getattr(model, "hf_quantizer", None) is not None:
        return False
    if is_remote_code(model) or has_added_adapters(model):
        return False
    # save_pretrained converts in the same way; on the meta device only names and shapes are computed.
    outline = {name: torch.empty(value.shape, dtype=value.dtype, device="meta") for name, value in state.items()}
    converted = stored_tensors(model, outline)
    return {name: value.shape for name, value in converted.items()} == {
        name: value.shape for name, value in outline.items()
    }


def _save_weights(model: Any, state: Mapping[str, Any], folder: Path, gather: _Gathering, max_shard_size: int) -> None:
    from safetensors.torch import save_file

    files = list(_files(state, max_shard_size))
    names = [f"model-{number:05}-of-{len(files):05}.safetensors" for number in range(1, len(files) + 1)]
    names = names if len(files) > 1 else [_WEIGHTS]  # as from_pretrained looks for them
    if gather.writes:
        # from_pretrained would take a file of an earlier save, which had another number of files, before these.
        for old in (*folder.glob("model-*-of-*.safetensors"), folder / _WEIGHTS, folder / _INDEX):
            old.unlink(missing_ok=True)
    for file_name, tensors in zip(names, files, strict=True):
        full = gather.all({name: state[name] for name in tensors})
        if gather.writes:
            on_cpu = {name: value.detach().cpu().contiguous() for name, value in full.items()}
            save_file(on_cpu, folder / file_name, metadata={"format": "pt"})
    if gather.writes:
        if len(files) > 1:
            weight_map = {name: file for file, tensors in zip(names, files, strict=True) for name in tensors}
            index = {"metadata": {"total_size": sum(map(_num_bytes, state.values()))}, "weight_map": weight_map}
            (folder / _INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        model.config.dtype = str(next(iter(state.values())).dtype).removeprefix("torch.")
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(folder)
        if model.can_generate():
            model.generation_config.save_pretrained(folder)


def _files(state: Mapping[str, Any], max_shard_size: int) -> Iterator[list[str]]:
    """Yield the names of the tensors in each file."""
    names: list[str] = []
    size = 0
    for name, value in state.items():
        if names and size + _num_bytes(value) > max_shard_size:
            yield names
            names, size = [], 0
        names.append(name)
        size += _num_bytes(value)
    yield names


def _num_bytes(value: Any) -> int:
    return int(torch.Size(value.shape).numel() * value.dtype.itemsize)


def _save_adapters(model: Any, state: Mapping[str, Any], folder: Path, gather: _Gathering) -> None:
    """Write the adapters of a model of peft, and what peft saves with them, without gathering the other weights."""
    from peft import get_peft_model_state_dict

    adapter_names: set[str] = set()
    if gather.writes:
        # peft renames the adapters, and returns the same tensors: by their ids these are the names in the state.
        names: dict[int, list[str]] = {}
        for name, value in state.items():
            names.setdefault(id(value), []).append(name)
        for adapter in model.peft_config:
            # peft's default: embeddings too, if they were resized, for which it reads the base model's configuration.
            selected = get_peft_model_state_dict(model, state_dict=dict(state), adapter_name=adapter)
            adapter_names.update(*(names[id(value)] for value in selected.values()))
    adapter_names = gather.broadcast(adapter_names)
    full = gather.all({name: value for name, value in state.items() if name in adapter_names})
    if gather.writes:
        on_cpu = {name: value.detach().cpu() for name, value in full.items()}
        model.save_pretrained(folder, state_dict=on_cpu)


class PretrainedCheckpoint(Callback):
    """A folder for ``from_pretrained`` at the end of a fit, or at the end of some epochs.

    Args:
        dirpath: The folder; with ``every_n_epochs`` of folders ``epoch-0``, ``epoch-1`` ...
        every_n_epochs: Number of epochs between two saves; None saves once, at the end.
        processing_class: What belongs to the model and has ``save_pretrained``, such as its tokenizer.
        max_shard_size: Largest size of a file of weights, in bytes.
    """

    saves_checkpoints = True

    def __init__(
        self,
        dirpath: str | Path,
        every_n_epochs: int | None = None,
        *,
        processing_class: Any | None = None,
        max_shard_size: int = DEFAULT_SHARD_SIZE,
    ) -> None:
        self.dirpath = Path(dirpath)
        self.every_n_epochs = every_n_epochs
        self.processing_class = processing_class
        self.max_shard_size = max_shard_size

    def on_train_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        epoch = trainer.current_epoch
        if self.every_n_epochs is not None and (epoch + 1) % self.every_n_epochs == 0:
            self._save(trainer, module, self.dirpath / f"epoch-{epoch}")

    def on_train_end(self, trainer: Trainer, module: TrainModule) -> None:
        if self.every_n_epochs is None:
            self._save(trainer, module, self.dirpath)

    def _save(self, trainer: Trainer, module: TrainModule, folder: Path) -> None:
        averages = (one for one in trainer.callbacks if isinstance(one, WeightAveraging))
        average = next(averages, None)  # a fit has one at most
        # As checkpoints, whose weights for an evaluation are the average.
        with nullcontext() if average is None else average.average_in_module(trainer):
            save_pretrained(module, folder, strategy=trainer.strategy, max_shard_size=self.max_shard_size)
        if self.processing_class is not None and trainer.is_global_zero:
            self.processing_class.save_pretrained(folder)
