"""Pipelines of causal language models: their layers in order, and what a stage computes."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from torch import Tensor

from dstrat import Pipeline
from dstrat.errors import MisuseError
from dstrat_transformers.models import (
    base_model,
    blocks,
    computed_again_with,
    count_labels,
    has_auxiliary_loss,
    is_peft,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from torch.nn import Module
    from torch.utils.hooks import RemovableHandle

_INPUTS = ("input_ids", "inputs_embeds", "labels")
_OF_HEAD = "logits_to_keep"  # an argument that only the output layer reads
_HIDDEN_DIMENSIONS = 3  # samples, tokens and features


def make_pipeline(
    model: Module,
    on_loss: Callable[[Tensor], None],
    arguments_of: Callable[[Mapping[str, Any]], AbstractContextManager[Mapping[str, Any]]],
) -> Pipeline:
    """Return the pipeline of a causal language model: embedding, blocks, the last norm and the output layer.

    Args:
        model: The model of transformers.
        on_loss: Called with the loss of each training batch.
        arguments_of: Returns the context of a call of the model with a batch, and its arguments.

    Raises:
        MisuseError: The model is no such one, or has further layers.
    """
    language_model: Any = model
    layers = _layers(language_model)
    body, head = language_model.base_model, layers[-1]
    names = inspect.signature(language_model.forward).parameters  # now, as an evaluation replaces it
    is_checked = False

    def compute(stage: Sequence[Module], value: Any, batch: Any) -> Any:
        nonlocal is_checked
        if not isinstance(batch, Mapping):  # positional arguments of an evaluation
            batch = dict(zip(names, batch if isinstance(batch, tuple) else (batch,), strict=False))
        # The model itself computes masks and positions, and calls its layers: those of other stages return their input.
        foreign = (layer for layer in layers[1:-1] if layer not in stage)
        begins = layers[0] in stage
        received = nullcontext() if begins else _receiving(layers[1], value)
        checked: AbstractContextManager[None] = nullcontext()
        if not is_checked:
            first = next((layer for layer in layers[1:-1] if layer in stage), layers[-2])
            checked, is_checked = _refusing_tuples(first, type(language_model).__name__), True
        with arguments_of(batch) as model_arguments, _passing_through(foreign), received, checked:
            arguments = {name: argument for name, argument in model_arguments.items() if name not in _INPUTS}
            if arguments.get("past_key_values") is not None:
                raise MisuseError(
                    f"{type(language_model).__name__} was called with a cache, and no rank of a pipeline has that of "
                    "all layers: call model.generate(..., use_cache=False)"
                )
            arguments |= {"use_cache": False, "input_ids" if begins else "inputs_embeds": value}
            if head in stage:
                return language_model(**arguments).logits
            arguments.pop(_OF_HEAD, None)
            return body(**arguments).last_hidden_state

    def mean_loss(logits: Tensor, batch: Mapping[str, Any]) -> Tensor:
        check_not_divided(language_model, batch)
        return causal_loss(language_model, logits, batch)

    return Pipeline(
        model=model,
        layers=layers,
        inputs=lambda batch: _first_input(language_model, batch),
        compute=compute,
        loss=mean_loss,
        weight=lambda batch: count_labels(model, batch),
        on_loss=on_loss,
    )


def return_outputs(model: Module) -> RemovableHandle:
    """Let a model whose stages return logits return the output of its ``forward``, with the loss of given labels.

    Args:
        model: The model.

    Returns:
        The handle that ends it, also as a context.
    """
    return model.register_forward_hook(_as_output, with_kwargs=True)


def _as_output(model: Module, _args: Any, kwargs: Mapping[str, Any], output: Any) -> Any:
    if not isinstance(output, Tensor):
        return output
    from transformers.modeling_outputs import CausalLMOutputWithPast

    loss: Any = None if kwargs.get("labels") is None else causal_loss(model, output, kwargs)
    return CausalLMOutputWithPast(loss=loss, logits=output)


def causal_loss(model: Any, logits: Tensor, batch: Mapping[str, Any]) -> Tensor:
    """Return the loss of a causal language model, as its ``forward`` computes it.

    Args:
        model: The model.
        logits: Its logits.
        batch: Its labels; ``shift_labels``, in which each token has the label that it predicts; and the number by which
            the sum over labels is divided, ``num_items_in_batch``, without which it is a mean.

    Raises:
        MisuseError: The batch has no labels.
    """
    check_labels(model, batch)
    options = {name: batch[name] for name in ("shift_labels", "num_items_in_batch") if batch.get(name) is not None}
    vocab_size = model.config.get_text_config().vocab_size
    loss: Tensor = model.loss_function(logits=logits, labels=batch["labels"], vocab_size=vocab_size, **options)
    return loss


def check_not_divided(model: Module, batch: Mapping[str, Any]) -> None:
    """Refuse a batch with ``num_items_in_batch``: its loss is no mean, which is weighted by the number of labels.

    Args:
        model: The model.
        batch: Its arguments.

    Raises:
        MisuseError: The batch has it.
    """
    if isinstance(batch, Mapping) and batch.get("num_items_in_batch") is not None:
        raise MisuseError(
            f"{type(model).__name__} got a batch with num_items_in_batch: leave it out, as the labels of all ranks, "
            "microbatches and accumulated batches are counted, and each counts the same"
        )


def check_labels(model: Module, batch: Mapping[str, Any]) -> None:
    """Refuse a batch without labels.

    Args:
        model: The model.
        batch: Its arguments.

    Raises:
        MisuseError: The batch has none.
    """
    if batch.get("labels") is None:
        names = ", ".join(name for name, value in batch.items() if value is not None)
        raise MisuseError(
            f"{type(model).__name__} got a batch with {names} and without labels: give it labels, as "
            "DataCollatorForLanguageModeling(tokenizer, mlm=False) does"
        )


def _first_input(model: Module, batch: Mapping[str, Any]) -> Any:
    if batch.get("input_ids") is None:
        names = ", ".join(name for name, value in batch.items() if value is not None)
        raise MisuseError(
            f"{type(model).__name__} got a batch with {names}, and its first stage takes input_ids: give it these, or "
            "leave pp out"
        )
    return batch["input_ids"]


def _layers(model: Any) -> list[Module]:
    """Return the layers in order.

    Raises:
        MisuseError: The model is no causal language model, has a loss of experts, or has further layers.
    """
    name, advice = type(model).__name__, "leave pp out"
    if is_peft(model) or getattr(base_model(model), "loss_type", None) != "ForCausalLM":
        raise MisuseError(f"{name} is no model ...ForCausalLM, and only these have pipelines: {advice}")
    if has_auxiliary_loss(model):
        raise MisuseError(
            f"{name} has config.output_router_logits=True, and the loss of its experts is of layers in all stages, "
            f"while the last one computes that of the labels: set it to False, or {advice}"
        )
    body, decoder = model.base_model, blocks(model)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    inside = {id(block) for block in decoder}
    children = [child for child in body.children() if any(True for _ in child.parameters())]
    norms = [child for child in children if child is not embedding and not inside & set(map(id, child.modules()))]
    outer = [child for child in model.children() if child is not body and any(True for _ in child.parameters())]
    if body is model or len(norms) != 1 or outer != [head] or children[-1] is not norms[0]:
        names = ", ".join(child_name for child_name, child in body.named_children() if child in children)
        raise MisuseError(
            f"{name} has the layers {names}, and a pipeline is known for an embedding, blocks, one norm and an output "
            f"layer: {advice}, or define configure_pipeline in a subclass of HFModule"
        )
    return [embedding, *decoder, norms[0], head]


@contextmanager
def _receiving(block: Any, value: Any) -> Iterator[None]:
    """In this context the first block gets what an earlier stage has sent.

    The model passes what it makes of its ``inputs_embeds``, such as with Granite's multiplier or a dropout, which the
    first stage has done already.
    """

    def replace(_: Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        return (value, *arguments[1:])

    hook = block.register_forward_pre_hook(replace, prepend=True)  # before those that gather and cast
    try:
        with computed_again_with(block, value):  # which calls hooks in the backward pass, when this context has ended
            yield
    finally:
        hook.remove()


@contextmanager
def _refusing_tuples(layer: Module, name: str) -> Iterator[None]:
    """In this context blocks that return tuples are an error at a layer: blocks of other stages return their input."""

    def check(is_tuple: bool) -> None:
        if is_tuple:
            raise MisuseError(
                f"blocks of {name} return tuples, and a pipeline is known for blocks that return a tensor: leave pp "
                "out, or define configure_pipeline in a subclass of HFModule"
            )

    # Of the tensor of another stage's block, the model takes the first sample for the first value of a tuple.
    hooks = [
        layer.register_forward_pre_hook(lambda _, inputs: check(inputs[0].dim() < _HIDDEN_DIMENSIONS), prepend=True),
        layer.register_forward_hook(lambda _module, _inputs, output: check(isinstance(output, tuple))),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _passing_through(layers: Iterable[Module]) -> Iterator[None]:
    """In this context layers return their first argument."""
    # A strategy may have replaced it, for another stage of this rank, to compute activations again.
    replaced = [(layer, vars(layer).get("forward")) for layer in layers]
    for layer, _ in replaced:
        layer.forward = _first_argument
    try:
        yield
    finally:
        for layer, forward in replaced:
            del layer.forward
            if forward is not None:
                layer.forward = forward


def _first_argument(value: Any, *_args: Any, **_kwargs: Any) -> Any:
    return value
