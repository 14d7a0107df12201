"""Activation memory: layers that compute activations again, or keep them on the host, until the backward pass."""

from __future__ import annotations

import functools
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from typing_extensions import Self

from dstrat.errors import ConflictError, MisuseError, RequestError
from dstrat.interfaces.batch import tensors_in
from dstrat.parallel.activation_offload import ActivationOffload
from dstrat.parallel.internals import arguments_of, change_count, storage_key
from dstrat.parallel.layers import checked_policy, is_compiled, repeated_layers, selected_layers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from torch.nn import Module

    from dstrat.parallel.layers import LayerClasses, LayerPolicy

Recomputation = Literal["full", "selective"]
_RECOMPUTATIONS: tuple[Recomputation, ...] = ("full", "selective")


@dataclass(frozen=True, kw_only=True, slots=True)
class ActivationMemory:
    """How layers save activations for the backward pass, from the options of a strategy.

    Losses are those without it, bit for bit.

    Attributes:
        recomputation: ``"full"`` saves a layer's inputs, and computes the rest again in the backward pass;
            ``"selective"`` also saves the results of matrix products, convolutions and attention, which take most of
            the time; None saves everything.
        recomputed: The layers: classes, or a function of a module; None for repeated ones.
        offloads: Whether layers move what they save to the host, and back for the backward pass.
        offloaded: These layers; None for ``recomputed``, or repeated ones.
    """

    recomputation: Recomputation | None = None
    recomputed: LayerPolicy | None = None
    offloads: bool = False
    offloaded: LayerPolicy | None = None

    @classmethod
    def of(
        cls,
        activation_checkpointing: LayerClasses | str | None,
        activation_checkpointing_policy: LayerPolicy | None,
        activation_offload: bool | LayerClasses | LayerPolicy = False,
    ) -> Self | None:
        """Return the activation memory for options of a strategy; None if they change nothing.

        Args:
            activation_checkpointing: ``"full"``, ``"selective"``, or classes of layers that recompute everything.
            activation_checkpointing_policy: Classes of layers, or a function that returns whether it selects a module.
            activation_offload: True, False, classes of layers, or such a function.

        Raises:
            ConflictError: Two options select layers.
            RequestError: An option has another value.
        """
        recomputation: Recomputation | None = None
        classes: LayerPolicy | None = None
        if activation_checkpointing in _RECOMPUTATIONS:
            recomputation = activation_checkpointing
        elif activation_checkpointing is not None:
            values = tuple(map(repr, _RECOMPUTATIONS))
            classes = checked_policy("activation_checkpointing", activation_checkpointing, or_values=values)
            recomputation = "full"
        if classes is not None and activation_checkpointing_policy is not None:
            raise ConflictError(
                "activation_checkpointing and activation_checkpointing_policy both select layers: leave one out"
            )
        policy = checked_policy("activation_checkpointing_policy", activation_checkpointing_policy)
        if policy is not None and recomputation is None:
            recomputation = "full"
        offloaded = None
        if not isinstance(activation_offload, bool) and activation_offload is not None:
            offloaded = checked_policy("activation_offload", activation_offload, or_values=("True", "False"))
        offloads = bool(activation_offload)
        if recomputation is None and not offloads:
            return None
        return cls(
            recomputation=recomputation,
            recomputed=policy if classes is None else classes,
            offloads=offloads,
            offloaded=offloaded,
        )

    def select(
        self, module: Module, device: torch.device, *, has_streams: bool = False, host: str = "cpu"
    ) -> Callable[[], Callable[[], None]]:
        """Select the layers of a module; return a function that changes how they save activations.

        That one returns a function that undoes it.  ``forward`` is replaced on the instances.  A wrapper module would
        change the names of parameters.

        Args:
            module: The module, before a strategy wraps its layers.
            device: Device of the training; activations on a CPU are on the host already.
            has_streams: Whether copies to the host run beside computation there.
            host: Device type to which activations are offloaded.

        Raises:
            RequestError: The module has no such layers.
        """
        names = {layer: name for name, layer in module.named_modules()}
        wraps: list[tuple[Module, Callable[[Module], Callable[..., Any]]]] = []
        if self.recomputation is not None:
            wraps += [
                (layer, functools.partial(_recomputing, self.recomputation, names[layer]))
                for layer in self._layers(module, self.recomputed, "activation_checkpointing")
            ]
        if self.offloads and device.type != host:
            offload = ActivationOffload(host, device, has_streams=has_streams)
            selection = self.recomputed if self.offloaded is None else self.offloaded
            wraps += [(layer, offload.offloading) for layer in self._layers(module, selection, "activation_offload")]
        return functools.partial(_replace_forwards, wraps)

    @staticmethod
    def _layers(module: Module, policy: LayerPolicy | None, option: str) -> list[Module]:
        name = type(module).__name__
        compiled = [path for path, layer in module.named_modules() if path and is_compiled(layer)]
        if policy is None and compiled:
            raise RequestError(
                f"{option} selects repeated layers, and {compiled[0]!r} of {name} is wrapped by torch.compile: compile "
                "layers in place, layer.compile()"
            )
        layers = repeated_layers(module) if policy is None else selected_layers(module, policy)
        if layers:
            return layers
        if policy is None:
            raise RequestError(
                f"{option} finds no repeated layers in {name}: name the classes of its layers, "
                f"{'activation_checkpointing_policy' if option == 'activation_checkpointing' else option}={{Block}}"
            )
        raise RequestError(f"{option} of {policy!r} matches no layer of {name}")


def _replace_forwards(wraps: Iterable[tuple[Module, Callable[[Module], Callable[..., Any]]]]) -> Callable[[], None]:
    """Replace the ``forward`` of layers; return a function that undoes it."""
    replaced: list[tuple[Module, Any]] = []
    for layer, wrap in wraps:
        replaced.append((layer, vars(layer).get("forward")))
        layer.forward = functools.wraps(layer.forward)(wrap(layer))

    def undo() -> None:
        for layer, forward in reversed(replaced):
            if forward is None:
                vars(layer).pop("forward", None)
            else:
                layer.forward = forward

    return undo


# Computing again


class LayerLabel(str):
    """Name of a layer for messages, on which no computation depends."""

    __slots__ = ()


def _recomputing(recomputation: Recomputation, name: str, layer: Module) -> Callable[..., Any]:
    """Return a layer's forward that computes activations again in the backward pass."""
    # The reentrant way computes no gradients where no input of the layer requires one.
    options: dict[str, Any] = {"use_reentrant": False}
    label = LayerLabel(f"{name} ({type(layer).__name__})")
    has_buffers = any(True for _ in layer.buffers())
    buffers = ChangingBuffers(layer, label)
    if recomputation == "selective":
        options["context_fn"] = functools.partial(_selective_contexts, label, buffers if has_buffers else None)
    elif has_buffers:
        options["context_fn"] = buffers.contexts
    return functools.partial(checkpoint, layer.forward, **options)


def _selective_contexts(label: str, buffers: ChangingBuffers | None) -> tuple[Any, Any]:
    forward, backward = create_selective_checkpoint_contexts(_SavedResults(label).policy)
    if buffers is None:
        return forward, backward
    watching, restoring = buffers.contexts()
    return _both(watching, forward), _both(restoring, backward)


@contextmanager
def _both(outer: Any, inner: Any) -> Iterator[None]:
    with outer, inner:
        yield


class ChangingBuffers:
    """Buffers that a layer's forward pass changes, such as running statistics: computed again, it begins with the same.

    The first forward pass of a training shows which they are; the others are not copied in later ones.

    Args:
        layer: The layer.
        label: Its name, for an error.
    """

    def __init__(self, layer: Module, label: str) -> None:
        self._layer, self._label = layer, label
        self._changing: set[str] | None = None  # None until the first forward pass

    def contexts(self) -> tuple[Any, Any]:
        """Return the contexts of a forward pass and of its repetition in the backward pass."""
        before: dict[str, Tensor] = {}
        return self._watching(before), self._restoring(before)

    @contextmanager
    def _watching(self, before: dict[str, Tensor]) -> Iterator[None]:
        """Collect the values, before the forward pass, of the buffers that it changes."""
        if not torch.is_grad_enabled():  # it is not computed again
            yield
            return
        buffers = {name: buffer for name, buffer in self._layer.named_buffers() if not buffer.is_inference()}
        versions = {name: change_count(buffer) for name, buffer in buffers.items()}
        values = {
            name: buffer.detach().clone()
            for name, buffer in buffers.items()
            if self._changing is None or name in self._changing
        }
        yield
        changed = {name for name, buffer in buffers.items() if change_count(buffer) != versions[name]}
        if self._changing is None:
            # Kernels of batch norm change its statistics without counting.
            layers = self._layer.named_modules()
            statistics = {f"{path}." if path else "" for path, one in layers if hasattr(one, "running_mean")}
            changed |= {name for name in buffers if name[: name.rfind(".") + 1] in statistics}
            self._changing = changed
        changed |= self._changing
        if added := changed - self._changing:
            raise MisuseError(
                f"{self._label} changes its buffer {min(added)!r} in this forward pass and did not in the first one, "
                "so that activation_checkpointing cannot compute it again: leave the layer out by "
                "activation_checkpointing_policy, or change the buffer from the first step on"
            )
        before.update((name, values[name]) for name in changed if name in values)  # a layer may have removed one

    @contextmanager
    def _restoring(self, before: Mapping[str, Tensor]) -> Iterator[None]:
        """Let buffers have earlier values, and then again those of now."""
        # By data: their versions stay, which the graphs of other forward passes check.
        buffers = [
            (buffer, buffer.data, before[name]) for name, buffer in self._layer.named_buffers() if name in before
        ]
        for buffer, _, earlier in buffers:
            buffer.data = earlier.clone()  # as it may be computed again for another backward pass
        try:
            yield
        finally:
            for buffer, now, _ in buffers:
                buffer.data = now


_EXPENSIVE = (
    # Products and convolutions.
    *("mm", "addmm", "bmm", "baddbmm", "convolution", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm"),
    # Attention, by the kernels of GPUs and CPUs.
    *("_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"),
    *("_scaled_dot_product_cudnn_attention", "_scaled_dot_product_flash_attention_for_cpu"),
    *("_scaled_dot_product_fused_attention_overrideable", "_flash_attention_forward", "_efficient_attention_forward"),
)
_SENT = ("all_reduce", "reduce_scatter_tensor", "all_to_all_single")  # no larger than what a rank sends


@functools.cache
def _saved_operations() -> frozenset[Any]:
    aten, collectives = torch.ops.aten, torch.ops._c10d_functional  # noqa: SLF001 - the namespace of DTensor's collectives
    packets = [
        *(getattr(aten, name) for name in _EXPENSIVE if hasattr(aten, name)),
        *(getattr(collectives, name) for name in _SENT if hasattr(collectives, name)),
    ]
    return frozenset(getattr(packet, overload) for packet in packets for overload in packet.overloads())


class _SavedResults:
    """Policy of one forward pass of a layer: which results of operations it saves.

    Args:
        label: Name of the layer, for an error.
    """

    def __init__(self, label: str) -> None:
        self._label = label
        self._saved = _saved_operations()
        self._storages: set[int] = set()  # of results, which torch holds until the backward pass

    def policy(self, context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operation in self._saved and not _draws_random_numbers(operation, args, kwargs):
            self._storages.update(map(storage_key, tensors_in(getattr(context, "op_output", None))))
            return CheckpointPolicy.MUST_SAVE
        # torch would raise in the backward pass, without the layer's name.
        if (
            not context.is_recompute
            and self._storages
            and any(
                is_changed and isinstance(value, Tensor) and storage_key(value) in self._storages
                for _, value, is_changed in arguments_of(operation, args, kwargs)
            )
        ):
            raise MisuseError(
                f"{self._label} changes the result of a matrix product or convolution in place ({operation}), which "
                "activation_checkpointing='selective' saves: use the operation that returns a new tensor, such as "
                "with inplace=False, or activation_checkpointing='full'"
            )
        return CheckpointPolicy.PREFER_RECOMPUTE


def _draws_random_numbers(operation: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether an operation draws random numbers, as attention with dropout does.

    It is computed again then: otherwise dropout after it would draw other numbers than in the forward pass.
    """
    if torch.Tag.nondeterministic_seeded not in operation.tags:
        return False
    rates = [value for name, value, _ in arguments_of(operation, args, kwargs) if name == "dropout_p"]
    return bool(rates[0]) if rates else True
