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
    accepts_argument,
    attention_implementation,
    base_model,
    has_auxiliary_loss,
    joins_tokens_elsewhere,
    supports_sdpa,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from contextvars import Token

    from torch import Tensor
    from torch.nn import Module

_attention_of_torch = functional.scaled_dot_product_attention  # which a strategy replaces in its steps

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
        MisuseError: It is no causal language model, has a loss of experts, another implementation of attention, or
            something else that looks at several tokens.
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
    if not accepts_argument(model, "position_ids"):
        raise MisuseError(
            f"{name} takes no position_ids, so that each part of a sequence would begin at position 0: leave cp out"
        )
    if (reason := joins_tokens_elsewhere(base)) is not None:
        raise MisuseError(f"{name} has {reason}, of which cp gives each rank a part: leave cp out")


class FullMasks:
    """Attention of a model to whole sequences, of which its inputs are a part.

    A model makes masks for its inputs; these are made for the sequences of the attention mask, which is not cut.
    Attention itself is torch's ``scaled_dot_product_attention``, which the strategy replaces.

    Steps of a subclass may call the model with their batch, too: hooks of the model take the documents out of it.

    Args:
        model: The model.

    Raises:
        MisuseError: Its sequences cannot be divided.
    """

    def __init__(self, model: Module) -> None:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        check_divided_sequences(model)
        self._model = base_model(model)
        AttentionInterface.register(_FULL, sdpa_attention_forward)
        AttentionMaskInterface.register(_FULL, _make_mask)
        self._model.set_attn_implementation(_FULL)
        self._tokens: list[Token[_CutBatch | None] | None] = []  # of the calls that have begun
        self._hooks = [
            self._model.register_forward_pre_hook(self._begin_call, with_kwargs=True, prepend=True),
            self._model.register_forward_hook(self._end_call, always_call=True),
        ]

    def undo(self) -> None:
        """Restore the model's own implementation."""
        self._model.set_attn_implementation("sdpa")
        for hook in self._hooks:
            hook.remove()

    def _begin_call(
        self, model: Module, arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if _DOCUMENTS in options:
            options = dict(options)
            self._tokens.append(_cut_batch.set(_CutBatch(options.pop(_DOCUMENTS))))
            return arguments, options
        self._tokens.append(None)  # also before an error, after which torch calls _end_call
        if _cut_batch.get() is None and functional.scaled_dot_product_attention is not _attention_of_torch:
            raise MisuseError(
                f"{type(model).__name__} was called with a part of a batch whose sequences cp divides, so that "
                "positions and masks would be those of other tokens: call it with all of the batch, self.model(**batch)"
            )
        return arguments, options

    def _end_call(self, *_: Any) -> None:
        token = self._tokens.pop()
        if token is not None:
            _cut_batch.reset(token)

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
    is_packed = positions is not None and full.get("attention_mask") is None
    full[_DOCUMENTS] = find_packed_sequence_indices(positions) if is_packed else None
    if positions is None:
        full["position_ids"] = torch.arange(length, device=tokens.device).expand(tokens.shape[0], length)
    if full.get("attention_mask") is None:
        full["attention_mask"] = torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
    if full.get("labels") is not None:
        full["shift_labels"] = functional.pad(full["labels"], (0, 1), value=IGNORED_LABEL)[:, 1:]
    return {name: cut(value) if name in _CUT and value is not None else value for name, value in full.items()}


def join_batch(batch: Mapping[str, Any], join: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """Return the whole sequences of a batch of which a rank has its part.

    Args:
        batch: The result of :func:`cut_sequences`.
        join: Function of a tensor that returns that of whole sequences.
    """
    return {name: join(value) if name in _CUT and value is not None else value for name, value in batch.items()}
