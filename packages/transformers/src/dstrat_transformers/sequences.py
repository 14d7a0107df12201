"""Sequences that ranks divide, for causal language models: parts of batches, and masks of whole sequences."""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from dstrat.errors import MisuseError
from dstrat_transformers.models import (
    IGNORED_LABEL,
    attention_implementation,
    base_model,
    has_auxiliary_loss,
    supports_sdpa,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor
    from torch.nn import Module

_FULL = "dstrat_full_sequences"
"""Name of the attention implementation, which transformers looks up in its interfaces."""
_DOCUMENTS = "documents"


@dataclass(frozen=True, slots=True)
class _CutBatch:
    """The batch that a model computes, whose sequences are cut.

    Attributes:
        documents: The number of each token's document in the whole sequences; None where each is one document.
    """

    documents: Tensor | None


# In a context, not in a model: transformers has one function of masks for all models.
_cut_batch: ContextVar[_CutBatch | None] = ContextVar("cut_batch", default=None)
_CUT = ("input_ids", "inputs_embeds", "labels", "shift_labels", "position_ids")


def check_divided_sequences(model: Module) -> None:
    """Check that the sequences of a model can be divided.

    Raises:
        MisuseError: It is no causal language model, has a loss of experts, or another implementation of attention.
    """
    name, base = type(model).__name__, base_model(model)
    implementation = attention_implementation(base)
    if getattr(model, "loss_type", None) != "ForCausalLM":
        raise MisuseError(f"{name} is no model ...ForCausalLM, and only these have divided sequences: leave cp out")
    if has_auxiliary_loss(model):
        raise MisuseError(
            f"{name} has config.output_router_logits=True, and the loss of its experts is over whole sequences, "
            "which cp divides: set it to False, or leave cp out"
        )
    if implementation != "sdpa":
        advice = "create the model with attn_implementation='sdpa', or " if supports_sdpa(base) else ""
        raise MisuseError(
            f"{name} has attn_implementation={implementation!r}, and cp divides the sequences of 'sdpa' only: "
            f"{advice}leave cp out"
        )


class FullMasks:
    """Attention of a model to whole sequences, of which its inputs are a part.

    A model makes masks for its inputs; these are made for the sequences of the attention mask, which is not cut.
    Attention itself is torch's ``scaled_dot_product_attention``, which the strategy replaces.

    Args:
        model: The model.

    Raises:
        MisuseError: It is no causal language model, has a loss of experts, or another implementation of attention.
    """

    def __init__(self, model: Module) -> None:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        check_divided_sequences(model)
        self._model = base_model(model)
        AttentionInterface.register(_FULL, sdpa_attention_forward)
        AttentionMaskInterface.register(_FULL, _make_mask)
        self._model.set_attn_implementation(_FULL)

    def undo(self) -> None:
        """Restore the model's own implementation."""
        self._model.set_attn_implementation("sdpa")

    @contextmanager
    def of(self, batch: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """In this context masks are those of a batch; yields the arguments of the model without labels."""
        arguments = {name: value for name, value in batch.items() if name not in ("labels", "shift_labels")}
        outer = _cut_batch.get()  # of an evaluation of a pipeline, whose stages call the model again
        token = _cut_batch.set(_CutBatch(arguments.pop(_DOCUMENTS, outer and outer.documents)))
        try:
            yield arguments
        finally:
            _cut_batch.reset(token)


def _make_mask(*, mask_function: Callable[..., Any], allow_is_causal_skip: bool = True, **options: Any) -> Any:
    """Return the mask of whole sequences, as ``sdpa_mask`` of transformers; None for plain causal attention."""
    from transformers.masking_utils import and_masks, packed_sequence_mask_function, sdpa_mask

    batch = _cut_batch.get()
    if batch is not None:  # otherwise a callback generates text
        length = options["attention_mask"].shape[-1]
        options |= {"q_length": length, "kv_length": length}
        if batch.documents is not None:
            mask_function = and_masks(mask_function, packed_sequence_mask_function(batch.documents))
            allow_is_causal_skip = False
    return sdpa_mask(mask_function=mask_function, allow_is_causal_skip=allow_is_causal_skip, **options)


def cut_sequences(batch: Mapping[str, Any], cut: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """Return a rank's part of a batch of a causal language model.

    Each token gets its position and the label that it predicts, as the next token may be another rank's.  Positions
    that begin again, without an attention mask, separate documents, as everywhere in transformers.

    Args:
        batch: Arguments of the model, whose tensors have whole sequences.
        cut: Function of a tensor that returns its part.
    """
    from transformers.masking_utils import find_packed_sequence_indices

    full = dict(batch)
    tokens = full["input_ids"] if "input_ids" in full else full["inputs_embeds"]
    length = tokens.shape[1]
    positions = full.get("position_ids")
    if positions is not None and full.get("attention_mask") is None:
        full[_DOCUMENTS] = find_packed_sequence_indices(positions)
    if positions is None:
        full["position_ids"] = torch.arange(length, device=tokens.device).expand(tokens.shape[0], length)
    if full.get("attention_mask") is None:
        full["attention_mask"] = torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
    if full.get("labels") is not None:
        full["shift_labels"] = functional.pad(full["labels"], (0, 1), value=IGNORED_LABEL)[:, 1:]
    return {name: cut(value) if name in _CUT and value is not None else value for name, value in full.items()}
