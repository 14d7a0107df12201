"""Weights under the names of ``from_pretrained``, one layer after the other, while a model is trained."""

from __future__ import annotations

import itertools
import re
from typing import TYPE_CHECKING, Any

from dstrat.errors import MisuseError, RequestError
from dstrat_transformers.models import is_peft, is_pretrained_model, is_remote_code, stored_tensors, unsaved_names
from dstrat_transformers.tensor_parallel import slicings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor
    from torch.nn import Module

    from dstrat.interfaces.strategy import Strategy

_BLOCK = re.compile(r".*?\.\d+\.")  # "model.layers.3." of "model.layers.3.mlp.up_proj.weight"


def stream_pretrained(
    module: Module, strategy: Strategy, *, everywhere: bool = False, tensor_parallel: tuple[int, int] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of a model under the names of its files, for an engine that runs it; collective until its end.

    The tensors are those of ``save_pretrained``, full ones of any layout, also where the files have others than the
    module, such as those of each expert.  A process holds at most those of one block beside its own shards.

    Args:
        module: The model of transformers, or the HFModule with it; also a model in another module of the strategy.
        strategy: The strategy in whose run the model is.
        everywhere: Whether each process gets the tensors; otherwise global rank 0 does, and the others, which take
            part too, get none.
        tensor_parallel: The rank and the number of ranks of an engine that is tensor parallel, of whose plan in
            transformers each tensor is this rank's slice; processes may have different ranks.  None for full tensors.

    Yields:
        The name of a tensor, and the tensor on the device, which is valid until the next one.

    Raises:
        MisuseError: The model is not a plain model of transformers, or not the strategy's.
        RequestError: It cannot be divided over the ranks of the engine; or there is no such rank.
    """
    model: Any = module if is_pretrained_model(module) else getattr(module, "model", module)
    _check(model)
    prefix = _prefix(model, strategy)
    divide = _division(model, tensor_parallel, getattr(module, "tensor_parallel_plan", None))
    unsaved = unsaved_names(model)

    def is_saved(name: str) -> bool:
        return name.startswith(prefix) and name.removeprefix(prefix) not in unsaved

    weights = strategy.stream_weights(everywhere=everywhere, selects=is_saved)
    saved = ((name.removeprefix(prefix), tensor) for name, tensor in weights)
    # By block: several tensors of the module may become one of the files.
    for _, tensors in itertools.groupby(saved, key=lambda item: _block_of(item[0])):
        # The slices are those of the module's tensors: of those in the files, a plan has other names.
        yield from stored_tensors(model, {name: divide(name, tensor) for name, tensor in tensors}).items()


def _prefix(model: Module, strategy: Strategy) -> str:
    """Return what the names of a model's tensors begin with in the module of a strategy, which may be the model.

    Raises:
        MisuseError: The model is no part of that module.
    """
    # In transformers' Trainer and in loops with Accelerate, it is a module of ours around the program's model.
    path = next((name for name, layer in strategy.module.named_modules() if layer is model), None)
    if path is None:
        raise MisuseError(
            f"{type(strategy).__name__} has no {type(model).__name__} that is this one: pass the model that it trains, "
            "in its run"
        )
    return f"{path}." if path else ""


def _division(model: Module, tensor_parallel: tuple[int, int] | None, plan: Any) -> Callable[[str, Tensor], Tensor]:
    """Return the function of a tensor and its name that returns what a rank of an engine has of it.

    Raises:
        RequestError: There is no such rank, or the model cannot be divided.
    """
    if tensor_parallel is None:
        return lambda _, tensor: tensor
    rank, size = tensor_parallel
    if not 0 <= rank < size:
        raise RequestError(
            f"tensor_parallel={tensor_parallel!r} is not a rank and the number of ranks: give (0, {max(size, 1)}) for "
            "the first one"
        )
    by_name = slicings(model, size, plan)
    return lambda name, tensor: by_name[name].of(tensor, rank, size) if name in by_name else tensor


def _block_of(name: str) -> str:
    match = _BLOCK.match(name)
    return match[0] if match else name


def _check(model: Any) -> None:
    if is_peft(model):
        problem = "has adapters of peft"
    elif not is_pretrained_model(model):
        problem = "is not a model of transformers"
    elif getattr(model, "hf_quantizer", None) is not None:
        problem = "is quantized"
    elif is_remote_code(model):
        problem = "is a class of your own"
    else:
        return
    raise MisuseError(
        f"stream_pretrained yields the weights of a plain model of transformers, and {type(model).__name__} {problem}: "
        "use strategy.stream_weights(), which yields those of any module under its own names"
    )
