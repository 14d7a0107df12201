"""Facts about models of transformers: the base model, blocks, shared parameters, labels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor
    from torch.nn import Module


IGNORED_LABEL = -100
"""Label of the tokens that no loss counts, in all of transformers."""


def base_model(model: Module) -> Any:
    """Return the model of transformers inside a model of peft, or the model itself."""
    return model.get_base_model() if is_peft(model) else model  # type: ignore[operator]  # peft's


def is_peft(model: Module) -> bool:
    """Return whether a model is one of peft, with adapters beside frozen weights."""
    return any(base.__module__ == "peft.peft_model" and base.__name__ == "PeftModel" for base in type(model).__mro__)


def is_pretrained_model(model: object) -> bool:
    """Return whether an object is a PreTrainedModel, without importing transformers."""
    names = ((base.__module__, base.__name__) for base in type(model).__mro__)
    return ("transformers.modeling_utils", "PreTrainedModel") in names


def block_classes(model: Module) -> set[str]:
    """Return the names of the classes of layers that transformers keeps on one device: ``_no_split_modules``."""
    names: set[str] = set()
    for layer in model.modules():
        names |= set(getattr(layer, "_no_split_modules", None) or ())
    return names


def blocks(model: Module) -> list[Module]:
    """Return the layers of a model that are sharded as units, outermost ones only.

    Those that share a parameter with a layer outside of them, such as embeddings, are left out.
    """
    names = block_classes(model)

    def visit(layer: Module) -> Iterator[Module]:
        for child in layer.children():
            if type(child).__name__ in names and not _shares_parameters(child, model):
                yield child
            else:
                yield from visit(child)

    return list(visit(model))


def _shares_parameters(block: Module, model: Module) -> bool:
    inside = {id(layer) for layer in block.modules()}
    outside = {
        id(parameter)
        for layer in model.modules()
        if id(layer) not in inside
        for parameter in layer.parameters(recurse=False)
    }
    return any(id(parameter) in outside for parameter in block.parameters())


def tied_parameters(model: Module) -> list[tuple[Tensor, list[tuple[Module, str]]]]:
    """Return the parameters that several layers share, each with its layers and its names in them."""
    owners: dict[int, tuple[Tensor, list[tuple[Module, str]]]] = {}
    for layer in model.modules():
        for name, parameter in layer.named_parameters(recurse=False, remove_duplicate=False):
            owners.setdefault(id(parameter), (parameter, []))[1].append((layer, name))
    return [entry for entry in owners.values() if len(entry[1]) > 1]


def count_labels(model: Module, batch: Mapping[str, Any]) -> Tensor | None:
    """Return the number of labels that a model's loss is the mean of, as a tensor; None where it is not known.

    Args:
        model: The model.
        batch: Arguments of its ``forward``; ``labels`` of integers, -100 for those that do not count.
    """
    labels = batch.get("labels")
    if labels is None or not hasattr(labels, "dim") or labels.dtype.is_floating_point or labels.dim() == 0:
        return None
    is_causal = getattr(base_model(model), "loss_type", None) == "ForCausalLM"
    counted: Tensor = labels[..., 1:] if is_causal and labels.dim() > 1 else labels  # the first token is not predicted
    return (counted != IGNORED_LABEL).sum()
