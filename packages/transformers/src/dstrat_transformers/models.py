"""Facts about models of transformers 5, and the only uses of its private names."""

from __future__ import annotations

import copy
import inspect
import re
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from torch import Tensor
    from torch.nn import Module


IGNORED_LABEL = -100
"""Label of the tokens that no loss counts, in all of transformers."""


# Classes


def derives_from(value: object, module: str, name: str) -> bool:
    """Return whether the class of a value is, or derives from, that of another library, without importing it."""
    return any(base.__module__ == module and base.__name__ == name for base in type(value).__mro__)


def base_model(model: Module) -> Any:
    """Return the model of transformers inside a model of peft, or the model itself."""
    return model.get_base_model() if is_peft(model) else model  # type: ignore[operator]  # peft's


def is_peft(model: Module) -> bool:
    """Return whether a model is one of peft, with adapters beside frozen weights."""
    return derives_from(model, "peft.peft_model", "PeftModel")


def learns_prompts(model: Module) -> bool:
    """Return whether a model is one of peft whose files have prompts, which it computes from its parameters."""
    configs: Any = model.peft_config.values() if is_peft(model) else ()  # type: ignore[operator]  # peft's
    return any(config.is_prompt_learning for config in configs)


def has_added_adapters(model: Any) -> bool:
    """Return whether a PreTrainedModel has adapters that its ``add_adapter`` has put into it, and saves only these."""
    return bool(getattr(model, "_hf_peft_config_loaded", False))


def accepts_argument(model: Module, name: str) -> bool:
    """Return whether the ``forward`` of a model of transformers has an argument of that name."""
    return name in inspect.signature(base_model(model).forward).parameters


def attention_implementation(model: Any) -> str:
    """Return the name of the attention implementation of a PreTrainedModel."""
    name: str = model.config._attn_implementation  # noqa: SLF001 - there is no public name
    return name


def supports_sdpa(model: Any) -> bool:
    """Return whether a PreTrainedModel can attend by ``scaled_dot_product_attention`` of torch."""
    return bool(model._supports_sdpa)  # noqa: SLF001 - there is no public name


def joins_tokens_elsewhere(model: Any) -> str | None:
    """Return what looks at several tokens in a PreTrainedModel beside its attention; None if nothing does.

    Convolutions and recurrences along the sequence do, and rotary embeddings that depend on its length.
    """
    kinds = {*(getattr(model.config.get_text_config(), "layer_types", None) or ())}
    if without_attention := sorted(kinds - {"full_attention", "sliding_attention", "chunked_attention"}):
        return f"layers of the type {without_attention[0]!r}"
    for layer in model.modules():
        types = getattr(layer, "rope_type", None)
        for name in types.values() if isinstance(types, dict) else [types]:
            if isinstance(name, str) and ("dynamic" in name or name == "longrope"):
                return f"rotary embeddings of the type {name!r}, which depend on the length of a sequence"
    return None


def has_auxiliary_loss(model: Any) -> bool:
    """Return whether the ``forward`` of a PreTrainedModel adds another loss to that of the labels: of its experts."""
    return bool(getattr(model.config.get_text_config(), "output_router_logits", False))


def is_pretrained_model(model: object) -> bool:
    """Return whether an object is a PreTrainedModel."""
    return derives_from(model, "transformers.modeling_utils", "PreTrainedModel")


def is_constructor(function: Any) -> bool:
    """Return whether a function is a class of models, or its ``from_config``, which make new models."""
    return isinstance(function, type) or getattr(function, "__name__", "") in ("from_config", "_from_config")


def constructor_of(cls: Any) -> Callable[..., Any]:
    """Return the function of a config that makes models of a class, or of the class that an Auto class selects."""
    # Only the Auto classes have a public name for it.
    return cls.from_config if hasattr(cls, "from_config") else cls._from_config  # type: ignore[no-any-return]


def make_from_config(cls: Any, config: Any, **options: Any) -> Any:
    """Return a new model of a class of transformers, or of the class that one of its Auto classes selects."""
    return constructor_of(cls)(config, **options)


# Values and files


def initialize_layer(model: Any, layer: Module) -> None:
    """Give the direct parameters of a layer their first values, by the rules of the PreTrainedModel that it is in.

    The public ``initialize_weights`` always initializes all layers.
    """
    model._init_weights(layer)  # noqa: SLF001 - the method that models override


def has_layers_of_other_dtype(model: Any, dtype: Any) -> bool:
    """Return whether ``from_pretrained`` would load some layers of a PreTrainedModel in float32 instead of a dtype."""
    return bool(model._get_dtype_plan(dtype))  # noqa: SLF001 - of _keep_in_fp32_modules


def is_remote_code(model: Any) -> bool:
    """Return whether a PreTrainedModel's class is the user's, whose source its ``save_pretrained`` copies."""
    return getattr(model, "_auto_class", None) is not None  # set by register_for_auto_class


def unsaved_names(model: Any) -> set[str]:
    """Return the names in a PreTrainedModel's state dict that its ``save_pretrained`` leaves out."""
    tied = getattr(model, "all_tied_weights_keys", None) or ()  # names of other parameters again
    return {*tied, *(model._keys_to_ignore_on_save or ())}  # noqa: SLF001 - there is no public name


def stored_tensors(model: Any, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tensors that the files of a PreTrainedModel have for those of its state dict, or of a part of it."""
    from transformers.core_model_loading import revert_weight_conversion

    converted: dict[str, Any] = revert_weight_conversion(model, dict(state))
    return converted


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredParameter:
    """The tensors in files that a parameter of a PreTrainedModel is made of, such as those of each of its experts.

    Attributes:
        name: Name of the parameter.
        keys: Names of the tensors in order, by their patterns in transformers.
        converter: Makes the parameter of them; None if it is the only tensor.
    """

    name: str
    keys: Mapping[str, Sequence[str]]
    converter: Any

    @property
    def has_tensors_of_rows(self) -> bool:
        """Whether it has a tensor of each pattern for each index of its first dimension."""
        from transformers.core_model_loading import Concatenate, MergeModulelist

        first, *following = self.converter.operations if self.converter is not None else [None]
        joins_rows = isinstance(first, MergeModulelist) and first.dim == 0
        return joins_rows and all(isinstance(step, Concatenate) and step.dim > 0 for step in following)

    def of_rows(self, rows: slice) -> StoredParameter:
        """Return the tensors of some rows, if it has tensors of each."""
        keys = {pattern: of_pattern[rows] for pattern, of_pattern in self.keys.items()}
        return StoredParameter(name=self.name, keys=keys, converter=self.converter)

    def convert(self, model: Any, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the parameter.

        Args:
            model: The model.
            tensors: The tensors by their names.
        """
        if self.converter is None:
            return next(iter(tensors.values()))
        converter = copy.deepcopy(self.converter)  # which collects tensors
        for pattern, keys in self.keys.items():
            for key in keys:
                converter.add_tensor(self.name, key, pattern, tensors[key])
        converted: Tensor = converter.convert(self.name, model=model, config=model.config)[self.name]
        return converted


def stored_parameters(model: Any, names: Collection[str], keys: Collection[str]) -> dict[str, StoredParameter]:
    """Return the tensors that the parameters of a PreTrainedModel are made of, by the names of the parameters.

    A tensor of which several parameters are made is left out.

    Args:
        model: The model; its parameters need no values.
        names: Names of its parameters.
        keys: Names of the tensors in its files.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, dot_natural_key, rename_source_key

    transforms = get_model_conversion_mapping(model)
    converters = [one for one in transforms if isinstance(one, WeightConverter)]
    renamings = [one for one in transforms if not isinstance(one, WeightConverter)]
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    stored: dict[str, StoredParameter] = {}
    for key in sorted(keys, key=dot_natural_key):  # by the numbers of experts
        name, pattern = rename_source_key(key, renamings, converters)
        if name not in names and key in names:
            name, pattern = key, None
        converter = None if pattern is None else by_pattern[pattern]
        if converter is not None and len(converter.target_patterns) > 1:
            continue
        parameter = stored.setdefault(name, StoredParameter(name=name, keys={}, converter=converter))
        of_pattern: Any = parameter.keys
        of_pattern.setdefault(pattern or key, []).append(key)
    return stored


# Layers and parameters


def blocks(model: Module) -> list[Module]:
    """Return the layers of a model that are sharded as units, outermost ones only.

    They are those that transformers keeps on one device, ``_no_split_modules``.  Those that share a parameter with a
    layer outside of them, such as embeddings, are left out.
    """
    # Of each layer, as a model may contain others, such as one for images.
    names = {name for layer in model.modules() for name in getattr(layer, "_no_split_modules", None) or ()}

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


@contextmanager
def computed_again_with(block: Any, value: Any) -> Iterator[None]:
    """In this context a block that computes its activations again begins with a value, if it does so."""
    recompute = vars(block).get("_gradient_checkpointing_func")
    if recompute is None:
        yield
        return
    block._gradient_checkpointing_func = lambda function, _, *rest: recompute(function, value, *rest)  # noqa: SLF001 - of transformers
    try:
        yield
    finally:
        block._gradient_checkpointing_func = recompute  # noqa: SLF001 - likewise


def expert_layers(model: Module) -> list[Module]:
    """Return the layers of experts of a model, by its plan: those with parameters of the style ``grouped_gemm``."""
    inner = base_model(model)  # which has the names of the plan
    plan = getattr(inner, "ep_plan", None) or {}
    names = {name.rpartition(".")[0] for name, style in plan.items() if style == "grouped_gemm"}
    return [layer for name, layer in inner.named_modules() if generic_name(name) in names]


def generic_name(name: str) -> str:
    """Return the name of a layer as plans of transformers have it, with ``*`` for numbers."""
    return re.sub(r"\d+", "*", name)


def owners_of_parameters(model: Module) -> dict[int, list[tuple[Module, str]]]:
    """Return the layers that have each parameter, with its names in them, by the id of the parameter."""
    owners: dict[int, list[tuple[Module, str]]] = {}
    for layer in model.modules():
        for name, parameter in layer.named_parameters(recurse=False, remove_duplicate=False):
            owners.setdefault(id(parameter), []).append((layer, name))
    return owners


def count_labels(model: Module, batch: Mapping[str, Any]) -> Tensor | None:
    """Return the number of labels that a model's loss is the mean of, as a tensor; None where it is not known.

    Args:
        model: The model.
        batch: Arguments of its ``forward``; ``labels`` of integers, -100 for those that do not count; or
            ``shift_labels``, in which each token has the label that it predicts.
    """
    if batch.get("shift_labels") is not None:
        shifted: Tensor = batch["shift_labels"]
        return (shifted != IGNORED_LABEL).sum()
    labels = batch.get("labels")
    # Labels of a regression are floating point; there each sample counts the same anyway.
    if labels is None or not hasattr(labels, "dim") or labels.dtype.is_floating_point or labels.dim() == 0:
        return None
    counted: Tensor = labels
    if labels.dim() > 1 and _shifts_labels(base_model(model)):
        counted = labels[..., 1:]  # nothing predicts the first token
    return (counted != IGNORED_LABEL).sum()


def _shifts_labels(model: Any) -> bool:
    """Return whether the loss of a model is that of causal language models, in which each token predicts the next."""
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

    if getattr(
        getattr(model, "config", None), "is_encoder_decoder", False
    ):  # the inputs of its decoder are shifted instead
        return False
    if (loss_type := getattr(model, "loss_type", None)) in LOSS_MAPPING:
        return LOSS_MAPPING[loss_type] is ForCausalLMLoss
    # The default where the name of the class, such as GPT2LMHeadModel, has no type; some compute a loss of their own.
    code = getattr(inspect.unwrap(type(model).forward), "__code__", None)
    return code is not None and "loss_function" in code.co_names


def generate_together(model: Module) -> None:
    """Let ``generate`` run as many forward passes in all processes, where each pass is collective."""
    base_model(model)._is_fsdp_managed_module = True  # noqa: SLF001 - by which generate knows it


def generate_alone(model: Module) -> None:
    """Undo :func:`generate_together`."""
    vars(base_model(model)).pop("_is_fsdp_managed_module", None)
