"""Checks of what a module with stages may not do, before a run and in its steps."""

from __future__ import annotations

import functools
import re
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import clip_grad

from dstrat.errors import ConflictError, MisuseError
from dstrat.interfaces.batch import tensors_in
from dstrat.interfaces.pipeline import check_loss_of_stages
from dstrat.interfaces.state_dict import canonical_name
from dstrat.parallel.layers import is_compiled, uncompiled
from dstrat.parallel.optimizer_checks import find_coupling
from dstrat.training.metrics.metric_objects import is_metric
from dstrat_fsdp.memory import once_per_module

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from contextlib import AbstractContextManager

    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer

    from dstrat.interfaces.pipeline import Pipeline
    from dstrat.interfaces.strategy import TrainerLike
    from dstrat_mesh.schedule import Schedule


def check_pipeline(module: Module, trainer: TrainerLike) -> None:
    """Check that a module and its training can have stages.

    Raises:
        MisuseError: It defines no pipeline, or has statistics of batches.
        ConflictError: Its optimization is manual.
    """
    check_module(module)
    if trainer.is_fitting and not getattr(module, "automatic_optimization", True):
        raise ConflictError(
            f"{type(module).__name__} has automatic_optimization=False, and a pipeline runs forward and backward "
            "passes together: leave it out, or leave pp out"
        )


def check_module(module: Module) -> None:
    """Check that a module can have stages.

    Raises:
        MisuseError: It defines no pipeline, has another loss without it, or has statistics of batches.
    """
    name = type(module).__name__
    if not hasattr(module, "configure_pipeline"):
        raise MisuseError(
            f"{name} has no configure_pipeline, which a pipeline (pp) needs: define it to return "
            "dstrat.Pipeline(model=self.net, loss=lambda output, batch: mse_loss(output, batch[1]))"
        )
    check_loss_of_stages(module, "training_step")
    for layer in module.modules():
        if layer is module:
            continue
        if isinstance(layer, _BatchNorm):  # also without parameters or running statistics
            reason = "normalizes over a batch"
        elif {"running_mean", "weight"} & dict(layer.named_buffers(recurse=False)).keys() == {"running_mean"}:
            # A frozen batch norm has its weight as a buffer too, and changes none of them.
            reason = "keeps running statistics of batches"
        else:
            continue
        raise MisuseError(
            f"{name} has a {type(layer).__name__}, which {reason}, and a pipeline divides it into microbatches, so "
            "that results would be others: use a layer norm or group norm, or leave pp out"
        )


check_estimated_module = once_per_module(check_module)
"""Check a module that is estimated for many layouts, and does not change, once."""


def check_backward(module: Module, module_backward: Callable[..., None] | None) -> None:
    """Check that a module leaves it to the strategy to compute gradients.

    Raises:
        ConflictError: It has a ``backward`` of its own.
    """
    if module_backward is not None:
        raise ConflictError(
            f"{type(module).__name__} has a backward of its own, and a pipeline runs forward and backward passes "
            "together, without a call of it: change the loss of configure_pipeline instead, or leave pp out"
        )


def check_steps_stages(optimizer: Optimizer, ranks: int) -> None:
    """Check that an optimizer steps each parameter without the others, of which a rank has those of its stages only.

    Args:
        optimizer: The optimizer.
        ranks: Number of ranks with other stages.

    Raises:
        MisuseError: It does not.
    """
    if getattr(optimizer, "steps_shards", False):
        return
    reason = find_coupling(optimizer, may_draw=True)
    if reason is not None:
        raise MisuseError(
            f"{type(optimizer).__name__} cannot step the stages of a pipeline ({reason}), which are on {ranks} ranks: "
            "take another optimizer, such as torch.optim.AdamW, with gradient_clip_val if gradients are to be divided "
            "by their norm, or leave pp out"
        )


def check_not_compiled(module: Module, pipeline: Pipeline, schedule: Schedule) -> None:
    """Check that no compiled code has layers of several stages, or a backward pass that the schedule divides.

    Raises:
        MisuseError: A module is compiled that has several layers of the pipeline, or is its model; or any, and the
            schedule has passes for gradients of weights.
    """
    for name, container in module.named_modules():
        if not is_compiled(container) and container._compiled_call_impl is None:  # noqa: SLF001 - torch's
            continue
        subject = canonical_name(name) or type(module).__name__
        layer = uncompiled(container)
        inside = set(layer.modules())
        if pipeline.model in (container, layer) or len(inside.intersection(pipeline.chain)) > 1:
            raise MisuseError(
                f"{subject} is compiled as a whole, and a pipeline divides its "
                "layers over ranks: compile each layer instead, for layer in layers: layer.compile()"
            )
        if schedule.splits_backward:
            raise MisuseError(
                f"{subject} is compiled, and compiled code computes its gradients in one pass, which "
                f"schedule={schedule.name!r} divides: leave out to compile it, or choose 'Interleaved1F1B' or '1F1B'"
            )


def check_called(module: Module, pipeline: Pipeline) -> None:
    """Check that no module has hooks that training steps would not call, as these call the layers alone.

    Raises:
        MisuseError: One has.
    """
    if pipeline.compute is not None:  # which may call the model
        return
    chain = set(pipeline.chain)
    called = {inner for layer in chain for inner in layer.modules()}
    within = set(pipeline.model.modules()) - called
    for name, container in module.named_modules():
        hooks = (
            container._forward_hooks,  # noqa: SLF001 - torch's, and below
            container._forward_pre_hooks,  # noqa: SLF001
            container._backward_hooks,  # noqa: SLF001
            container._backward_pre_hooks,  # noqa: SLF001
        )
        if container in within and any(hooks) and not chain.isdisjoint(container.modules()):
            raise MisuseError(
                f"{name or type(module).__name__} has hooks on its forward or backward pass, and stages call its "
                "layers one after the other, without it: register them on the layers, or leave pp out"
            )


# Calls and weights of layers, outside of where all stages compute


@contextmanager
def replaced_forward(module: Module, forward: Callable[..., Any] | None) -> Iterator[None]:
    """In this context a module has another ``forward``, or for None that of its class."""
    earlier = vars(module).get("forward")

    def assign(function: Callable[..., Any] | None) -> None:
        vars(module).pop("forward", None)
        if function is not None:
            module.forward = function

    assign(forward)
    try:
        yield
    finally:
        assign(earlier)


@contextmanager
def refusing_calls(subjects: Mapping[Module, str], model: str) -> Iterator[None]:
    """In this context a call of the model, or of a layer that other ranks have, is an error that says so.

    Args:
        subjects: What these modules are, for a message.
        model: Name of the class of the model.
    """
    with ExitStack() as stack:
        for module, subject in subjects.items():
            refusing = functools.wraps(module.forward)(functools.partial(_refuse_call, subject, model))
            stack.enter_context(replaced_forward(module, refusing))
        yield


def _refuse_call(subject: str, model: str, *_args: Any, **_kwargs: Any) -> Any:
    raise MisuseError(
        f"{subject} was called where a rank computes alone, as in a hook: call {model}, the model of "
        "configure_pipeline, in a validation_step, test_step or predict_step, where all stages compute"
    )


class HiddenWeights:
    """The weights of a pipeline's layers, of which no rank has all: in :meth:`hiding` their values cannot be used.

    Shapes, dtypes and devices can.  On ranks that have a weight it is a shard, so that all of them get the same error,
    also for a call of a layer.

    Args:
        module: The user's module.
        layers: All layers of the pipeline, and what they are, for a message.
        device: The device of this rank.
        model: Name of the class of the model.
    """

    def __init__(self, module: Module, layers: Mapping[Module, str], device: torch.device, model: str) -> None:
        self._hooks = {
            layer: functools.partial(_refuse_call, subject, model)
            for layer, subject in layers.items()
            if any(True for _ in layer.parameters())
        }
        inside = {inner for layer in layers for inner in layer.modules()}
        hidden: dict[int, HiddenWeight] = {}
        self._entries = []
        for prefix, inner in module.named_modules():
            for name, parameter in inner.named_parameters(recurse=False) if inner in inside else ():
                if id(parameter) not in hidden:
                    full_name = f"{prefix}.{name}".lstrip(".")
                    hidden[id(parameter)] = HiddenWeight.of(parameter, full_name, type(module).__name__, model, device)
                self._entries.append((inner._parameters, name, hidden[id(parameter)]))  # noqa: SLF001 - torch's

    @contextmanager
    def hiding(self) -> Iterator[Callable[[], AbstractContextManager[None]]]:
        """In this context the weights are hidden, but in that of the function that this one gives."""
        visible: list[Any] = []
        handles: list[Any] = []

        def hide() -> None:
            visible[:] = [parameters[name] for parameters, name, _ in self._entries]
            for parameters, name, weight in self._entries:
                parameters[name] = weight
            # Before the hooks of shards, which would gather the layer.
            handles[:] = [layer.register_forward_pre_hook(hook, prepend=True) for layer, hook in self._hooks.items()]

        def show() -> None:
            for handle in handles:
                handle.remove()
            for (parameters, name, _), weight in zip(self._entries, visible, strict=True):
                parameters[name] = weight

        @contextmanager
        def showing() -> Iterator[None]:
            show()
            try:
                yield
            finally:
                hide()

        hide()
        try:
            yield showing
        finally:
            show()


_OUTLINES = {
    *(
        getattr(torch.Tensor, name)
        for name in ("size", "dim", "numel", "nelement", "element_size", "stride", "is_floating_point", "is_complex")
    ),
    torch.Tensor.__len__,
    torch.Tensor.__hash__,
    torch.is_floating_point,
    torch.is_complex,
    torch.numel,
}
"""Functions of a tensor that need no values."""
_VALUES = {"data", "T", "mT", "H", "mH", "real", "imag"}
"""Attributes of a tensor that have its values."""


class HiddenAttributeError(MisuseError, AttributeError):
    """A hidden weight has no shard; for ``hasattr``, by which libraries ask for one, it is a plain tensor."""


class HiddenWeight(torch.Tensor):
    """Shape, dtype and device of a weight, whose values are an error that names it.

    Attributes:
        message: The error.
        on_device: A tensor of its dtype on the device of this rank.
    """

    message: str
    on_device: Tensor
    _is_param = True  # for isinstance(weight, torch.nn.Parameter)

    @classmethod
    def of(cls, parameter: Tensor, name: str, module: str, model: str, device: torch.device) -> HiddenWeight:
        """Return what stands for a parameter.

        Args:
            parameter: The parameter, of which this rank may have a shard or nothing.
            name: Its name.
            module: Name of the class of the user's module.
            model: Name of the class of the model.
            device: The device of this rank.
        """
        empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
        weight: HiddenWeight = torch.Tensor._make_subclass(cls, empty, parameter.requires_grad)  # noqa: SLF001 - torch's
        weight.on_device = torch.empty(0, dtype=parameter.dtype, device=device)
        weight.message = (
            f"an evaluation step of {module} has used {name!r}, a weight of one stage of the pipeline, which the ranks "
            f"of others do not have: let a layer of {model} compute with it, which is called where all stages compute; "
            "or read it in a hook such as on_validation_epoch_end, where it is on the meta device of other ranks"
        )
        return weight

    def __getattr__(self, name: str) -> Any:
        if hasattr(DTensor, name):  # a tensor in shards, as a rank has it of its own stage
            raise HiddenAttributeError(self.message)
        raise AttributeError(f"{type(self).__name__} has no {name}")

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        weight = next(tensor for tensor in tensors_in((args, kwargs)) if isinstance(tensor, HiddenWeight))
        if getattr(func, "__name__", "") == "__get__":
            attribute = getattr(func.__self__, "__name__", "")
            if attribute == "device" or attribute.startswith("is_"):  # is_meta, is_cuda ...
                return getattr(weight.on_device, attribute)
            is_outline = attribute not in _VALUES
        else:
            is_outline = func in _OUTLINES
        if not is_outline:
            raise MisuseError(weight.message)
        return super().__torch_function__(func, types, args, dict(kwargs or {}))  # type: ignore[no-untyped-call]


@contextmanager
def explaining_foreign_weights(module: str, model: str) -> Iterator[None]:
    """In this context, where a loss is computed, torch's errors for weights of other stages say what they are.

    Args:
        module: Name of the class of the user's module.
        model: Name of the class of the model.
    """
    try:
        yield
    except RuntimeError as error:
        if re.search(r"\bmeta\b", str(error)) is None:  # the device of these weights, which torch names in several ways
            raise
        raise foreign_weights_error(module, model) from error


def foreign_weights_error(module: str, model: str) -> MisuseError:
    """Return the error for a loss that has used weights of other stages, by the arguments of the context."""
    return MisuseError(
        f"the loss of the pipeline of {module} has used weights of other stages, which the ranks of the last one do "
        f"not have: let a layer of {model} compute with them, whose output the loss gets, or leave pp out; for a "
        "penalty on all weights take weight_decay of the optimizer"
    )


# Gradients


@contextmanager
def refusing_to_clip(ranks: int) -> Iterator[None]:
    """In this context torch's function that clips by a norm refuses gradients of stages, of which it sees some."""
    # What clip_grad_norm_ calls, and not that itself, of which a program may have imported the name before.
    total_norm = clip_grad._get_total_norm  # noqa: SLF001 - torch's, of 2.9 to 2.13; get_total_norm is another name of it

    @functools.wraps(total_norm)
    def refuse(gradients: Any, *args: Any, **kwargs: Any) -> Any:
        gradients = [gradients] if isinstance(gradients, torch.Tensor) else list(gradients)
        if any(isinstance(gradient, DTensor) for gradient in gradients):
            raise MisuseError(
                "torch.nn.utils.clip_grad_norm_ takes the norm of the gradients of one rank, and the stages of the "
                f"pipeline are on {ranks}: pass gradient_clip_val to the Trainer or to loop.setup, or call "
                "self.clip_gradients(optimizer, value) in a module, or strategy.clip_gradients(optimizer, value)"
            )
        return total_norm(gradients, *args, **kwargs)

    clip_grad._get_total_norm = refuse  # type: ignore[assignment]  # noqa: SLF001
    try:
        yield
    finally:
        clip_grad._get_total_norm = total_norm  # noqa: SLF001


# Changes of a module by functions of the pipeline, which each rank calls for its own microbatches


@contextmanager
def refusing_changes_by_loss(modules: Mapping[str, Module]) -> Iterator[None]:
    """In this context a change of what modules have is an error.

    Args:
        modules: Those outside of the pipeline's layers, by name.
    """
    before = state_of(modules), attributes_of(modules)
    yield
    name = changed_name(before[0], state_of(modules)) or changed_attribute(before[1], attributes_of(modules))
    if name is not None:
        raise MisuseError(
            f"the loss of the pipeline has changed {name!r}, which only the ranks of the last stage would "
            "have, once for each microbatch, and checkpoints and logs take that of rank 0: update metrics in "
            "validation_step, keep a buffer in the forward of a layer of the pipeline, and count batches in a "
            "hook"
        )


def state_of(modules: Mapping[str, Module]) -> dict[str, tuple[Any, int]]:
    """Return what shows a change of the state of modules: objects and versions by name; buffers, and metric objects."""
    state: dict[str, tuple[Any, int]] = {}
    module: Any
    for prefix, module in modules.items():
        for name, buffer in module.named_buffers(recurse=False):
            state[f"{prefix}.{name}".lstrip(".")] = buffer, buffer._version  # noqa: SLF001 - torch's, for such checks
        if is_metric(module):
            state[prefix] = module, module.update_count
    return state


def changed_name(before: Mapping[str, tuple[Any, int]], after: Mapping[str, tuple[Any, int]]) -> str | None:
    """Return the first name with another object or version in a state, None if there is none."""
    for name, (value, version) in before.items():
        now, latest = after.get(name, (None, 0))
        if now is not value or latest != version:
            return name
    return None


def attributes_of(modules: Mapping[str, Module]) -> dict[str, tuple[Any, int]]:
    """Return the tensors and numbers that modules have as plain attributes, with the versions of tensors, by name."""
    return {
        f"{prefix}.{name}".lstrip("."): (value, value._version if isinstance(value, torch.Tensor) else 0)  # noqa: SLF001 - as above
        for prefix, module in modules.items()
        for name, value in vars(module).items()
        if isinstance(value, torch.Tensor) or type(value) in (int, float)
    }


def changed_attribute(before: Mapping[str, tuple[Any, int]], after: Mapping[str, tuple[Any, int]]) -> str | None:
    """Return the first name of an attribute with another value, None if there is none.

    A tensor of another shape is no such value: it may be kept for inputs of a size, such as a mask.
    """
    for name, (value, version) in before.items():
        now, latest = after.get(name, (value, version))
        if isinstance(value, torch.Tensor):
            is_same = now is value and latest == version
            if not is_same and isinstance(now, torch.Tensor) and now.shape == value.shape:
                return name
        elif type(now) is type(value) and now != value:
            return name
    return None
