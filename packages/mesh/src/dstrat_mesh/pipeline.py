"""Pipeline of a run: the stages of this rank, their steps, and their share of the module's state."""

from __future__ import annotations

import functools
import inspect
import itertools
import logging
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import utils
from torch.nn.modules.batchnorm import _BatchNorm

from dstrat.errors import ConflictError, DstratError, MisuseError
from dstrat.interfaces.pipeline import Pipeline, batch_size, check_loss_of_stages, split_batch
from dstrat.parallel.collectives import gather_tensors
from dstrat.parallel.internals import new_connections
from dstrat.parallel.job import current_job
from dstrat.parallel.optimizer_checks import find_coupling
from dstrat.parallel.process_group import noting_failed_steps
from dstrat.parallel.shards import local_tensor, with_local
from dstrat.training.metrics.metric_objects import is_metric
from dstrat.training.module.compiling import plain_name, wrapped_module
from dstrat_fsdp.memory import once_per_module
from dstrat_fsdp.parameters import empty_on_meta, made_on_meta, replace_parameters
from dstrat_mesh.axes import PIPELINE
from dstrat_mesh.runner import Links, StageRunner
from dstrat_mesh.stages import Stages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager
    from datetime import timedelta

    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh
    from torch.nn import Module
    from torch.optim import Optimizer

    from dstrat.interfaces.strategy import TrainerLike
    from dstrat_mesh.axes import Axes
    from dstrat_mesh.schedule import Schedule

_logger = logging.getLogger(__name__)


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


def pipeline_of(module: Any) -> Pipeline:
    """Return the pipeline that a checked module defines.

    Raises:
        MisuseError: ``configure_pipeline`` returns something else.
    """
    pipeline = module.configure_pipeline()
    if not isinstance(pipeline, Pipeline):
        raise MisuseError(
            f"configure_pipeline of {type(module).__name__} returned a {type(pipeline).__name__}: return a "
            "dstrat.Pipeline"
        )
    return pipeline


def check_not_compiled(module: Module, pipeline: Pipeline, schedule: Schedule) -> None:
    """Check that no compiled code has layers of several stages, or a backward pass that the schedule divides.

    Raises:
        MisuseError: A module is compiled that has several layers of the pipeline, or is its model; or any, and the
            schedule has passes for gradients of weights.
    """
    for name, container in module.named_modules():
        wrapped = wrapped_module(container)
        if wrapped is None and container._compiled_call_impl is None:  # noqa: SLF001 - torch's
            continue
        subject = plain_name(name) or type(module).__name__
        inside = set((container if wrapped is None else wrapped).modules())
        if pipeline.model in (container, wrapped) or len(inside.intersection(pipeline.chain)) > 1:
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


def number_of_layers(module: Any) -> int:
    """Return the number of layers of a module's pipeline; 0 if it has none whose order is known."""
    try:
        return len(pipeline_of(module).chain) if hasattr(module, "configure_pipeline") else 0
    except DstratError:  # also from hooks of modules that are defined for any model
        return 0


@once_per_module
def estimated_stages(module: Module, ranks: int, stages_per_rank: int) -> Stages:
    """Return the stages of a module that is estimated, as :meth:`Stages.of` does.

    Args:
        module: The module, with a pipeline.
        ranks: Number of ranks along the pipeline.
        stages_per_rank: Number of stages of each.
    """
    return Stages.of(module, pipeline_of(module), ranks, stages_per_rank)


@once_per_module
def estimated_layers(module: Module, ranks: int, stages_per_rank: int) -> list[nn.ModuleList]:
    """Return the layers of each rank of a module that is estimated, by the arguments of :func:`estimated_stages`."""
    stages = estimated_stages(module, ranks, stages_per_rank)
    return [nn.ModuleList(itertools.chain(*stages.layers_at(position))) for position in range(ranks)]


class PipelineRun:
    """The stages of this rank in a run, and its neighbours.

    Args:
        module: The user's module.
        mesh: The mesh of all ranks.
        axes: Its sizes.
        schedule: Order of the passes.
        device: The device of this rank.
        timeout: How long a stage waits for another one.
        loss_dtype: The dtype in which losses of microbatches are added.
        passes_communicate: Whether ranks with other batches take part in each pass, so that all need as many.

    Attributes:
        layers: A module with the layers of this rank's stages only, under their names in the user's module.
    """

    def __init__(
        self,
        module: Module,
        mesh: DeviceMesh,
        axes: Axes,
        schedule: Schedule,
        device: torch.device,
        timeout: timedelta,
        loss_dtype: torch.dtype,
        *,
        passes_communicate: bool,
    ) -> None:
        self._module, self._schedule, self._loss_dtype = module, schedule, loss_dtype
        self._passes_communicate = passes_communicate
        self._pipeline = pipeline_of(module)
        check_not_compiled(module, self._pipeline, schedule)
        check_called(module, self._pipeline)
        self._stages = Stages.of(module, self._pipeline, axes.pp, schedule.stages_per_rank)
        groups = axes.groups(PIPELINE)
        num_ways = 4 if schedule.stages_per_rank > 1 else 2
        with new_connections():
            # Not the group of the mesh, which is that of the job where a pipeline has all ranks: NCCL would send
            # activations in turn with its collectives.
            ways = [dist.new_subgroups_by_enumeration(groups, timeout=timeout)[0] for _ in range(num_ways)]
            # Those of shared parameters have no other ranks: the first messages in a group of NCCL need all of them.
            self._groups_of_shared: dict[tuple[int, ...], Any] = {}
            for positions in sorted({shared.positions for shared in self._stages.shared}):
                ranks = [[of_pipeline[position] for position in positions] for of_pipeline in groups]
                group, _ = dist.new_subgroups_by_enumeration(ranks, timeout=timeout)
                self._groups_of_shared[positions] = group
        self._links = Links(
            position=mesh.get_local_rank(PIPELINE),
            ranks=next(group for group in groups if dist.get_rank() in group),
            groups=ways,
            collective_group=mesh.get_group(PIPELINE),
            device=device,
        )
        self._layers_of_stages = self._stages.layers_at(self._links.position)
        self.layers = self._stages.skeleton(self._links.position)
        self._runner: StageRunner | None = None
        self._evaluator: StageRunner | None = None
        present = {inner for of_stage in self._stages.layers for layer in of_stage for inner in layer.modules()}
        self._outside = {name: inner for name, inner in module.named_modules() if inner not in present}
        self._has_trained = False
        self._guards = ExitStack()  # from start on

    def free_other_ranks(self) -> set[Module]:
        """Free the parameters of other ranks; return their modules that were made on the meta device."""
        foreign = self._stages.other_layers(self._links.position)
        on_meta = made_on_meta(foreign)
        replace_parameters(foreign, empty_on_meta)
        return on_meta

    def start(self, train: Callable[..., Any], evaluate: Callable[..., Any], *, log: bool) -> None:
        """Begin with the steps.

        Args:
            train: Runs a function with its arguments with gathered layers, for a backward pass.
            evaluate: Likewise, without gradients.
            log: Whether this rank logs the stages.
        """
        if log:
            for index, names in enumerate(self._stages.names):
                _logger.info("stage %d of the pipeline: %s", index, ", ".join(names))
        self._links.connect()  # not before the checks of a module whose last step failed, with messages on their way
        chain = self._pipeline.compute or _call_in_order
        layers, loss_of = self._layers_of_stages, self._pipeline.loss
        last = len(layers) - 1 if self._links.is_last else None

        outside = self._outside
        self._guards.enter_context(self._refusing_calls())
        self._guards.enter_context(_refusing_to_clip(len(self._links.ranks)))

        def compute(chunk: int, value: Any, batch: Any) -> Any:
            return chain(layers[chunk], value, batch)

        def compute_loss(chunk: int, value: Any, batch: Any) -> Any:
            output = compute(chunk, value, batch)
            if chunk != last:
                return output
            before = _state_of(outside), _attributes_of(outside)
            loss = loss_of(output, batch)
            name = _changed_name(before[0], _state_of(outside))
            name = name or _changed_attribute(before[1], _attributes_of(outside))
            if name is not None:
                raise MisuseError(
                    f"the loss of the pipeline has changed {name!r}, which only the ranks of the last stage would "
                    "have, once for each microbatch, and checkpoints and logs take that of rank 0: update metrics in "
                    "validation_step, keep a buffer in the forward of a layer of the pipeline, and count batches in a "
                    "hook"
                )
            return loss

        common = self._links, self._schedule, self._loss_dtype
        self._runner = StageRunner(*common, lambda *args: train(compute_loss, *args))
        self._evaluator = StageRunner(*common, lambda *args: evaluate(compute, *args))

    @contextmanager
    def _refusing_calls(self) -> Iterator[None]:
        """In this context a call of the model, or of a layer that other ranks have, is an error that says so."""
        layers = zip(itertools.chain(*self._stages.layers), itertools.chain(*self._stages.names), strict=True)
        refused = {
            layer: f"{name}, a layer of other ranks,"
            for layer, name in layers
            if any(parameter.is_meta for parameter in layer.parameters())
        }
        if self._pipeline.compute is None:  # which may call the model
            refused.setdefault(self._pipeline.model, f"{type(self._pipeline.model).__name__}, divided into stages,")
        with ExitStack() as stack:
            for module, subject in refused.items():
                refuse = functools.wraps(module.forward)(functools.partial(self._refuse, subject))
                stack.enter_context(_replaced_forward(module, refuse))
            yield

    def _refuse(self, subject: str, *_args: Any, **_kwargs: Any) -> Any:
        raise MisuseError(
            f"{subject} was called where a rank computes alone, as in a hook: call "
            f"{type(self._pipeline.model).__name__}, the model of configure_pipeline, in a validation_step, test_step "
            "or predict_step, where all stages compute"
        )

    # Steps

    def train(
        self,
        batch: Any,
        scale: Callable[[Tensor], Tensor],
        before_backward: Callable[[bool, bool], None],
        after_weights: Callable[[], None],
        weigh: Callable[[Tensor], Tensor],
        capture_logs: Callable[[], AbstractContextManager[Sequence[Any]]],
    ) -> Any:
        """Run the passes of a batch, and return its loss, with its weight if the pipeline counts one.

        Args:
            batch: The batch.
            scale: As for :meth:`StageRunner.train`.
            before_backward: Likewise.
            after_weights: Likewise.
            weigh: Returns the factor of the loss of a batch with a weight.
            capture_logs: Returns the context in which values that layers and loss log are collected instead.

        Raises:
            MisuseError: They log any.
        """
        assert self._runner is not None  # noqa: S101 - from start on
        pipeline, device = self._pipeline, self._links.device
        schedule = self._schedule
        if not self._passes_communicate:
            schedule = schedule.of_batch(batch_size(batch))
        microbatches = split_batch(batch, schedule.microbatches)
        factor = None
        if pipeline.weight is None:
            sizes = [batch_size(microbatch) for microbatch in microbatches]
            factors: Any = [size / sum(sizes) for size in sizes]
        else:
            counted = [pipeline.weight(microbatch) for microbatch in microbatches]
            weights = torch.stack(
                [torch.as_tensor(weight, dtype=self._loss_dtype, device=device) for weight in counted]
            )
            total = weights.sum()
            factors, factor = weights / torch.where(total > 0, total, 1.0), weigh(total)
        inputs = self._inputs_of(microbatches)
        is_watched = not self._has_trained and len(microbatches) > 1
        state = _state_of(dict(self.layers.named_modules())) if is_watched else {}
        if not self._links.is_last:
            scale(torch.zeros((), device=device))  # the last rank's scale adapts with its losses, and this one alike
        with capture_logs() as logged, self._sending_messages():
            loss = self._runner.train(
                schedule,
                inputs,
                microbatches,
                factors,
                scale if factor is None else lambda loss: scale(loss * factor),
                before_backward,
                after_weights,
                tuple(parameter.requires_grad for parameter in self._module.parameters()),
            )
        if state and (name := _changed_name(state, _state_of(dict(self.layers.named_modules())))) is not None:
            _logger.warning(
                "%s is changed in each forward pass, so that with %d microbatches it changes as often in each batch, "
                "and once on one device",
                name,
                len(microbatches),
            )
        self._has_trained = self._has_trained or is_watched
        if logged:
            names = ", ".join(sorted({f"log({call.name!r})" for call in logged}))
            raise MisuseError(
                f"{names} in the loss or a layer of the pipeline would give values of microbatches on the ranks of one "
                "stage, which others do not have: log the loss of a batch in Pipeline(on_loss=...), which each rank "
                "calls, and other values in validation_step"
            )
        if pipeline.on_loss is not None:
            pipeline.on_loss(loss)
        return loss if factor is None else {"loss": loss, "weight": total}

    def _inputs_of(self, microbatches: Sequence[Any]) -> list[Any]:
        """Return the input of the model for each microbatch.

        Raises:
            MisuseError: It has changed the module, too, for each of them.
        """
        first = self._pipeline.inputs(microbatches[0])
        before = _attributes_of(self._outside)
        inputs = [first, *map(self._pipeline.inputs, microbatches[1:])]
        name = _changed_attribute(before, _attributes_of(self._outside)) if len(inputs) > 1 else None
        if name is not None:
            raise MisuseError(
                f"inputs of the pipeline has changed {name!r}, and is called for all microbatches before the first "
                "loss, which would read the value of the last one: make it a part of the batch, in "
                "on_after_batch_transfer"
            )
        return inputs

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """In this context the pipeline's model computes with all stages."""
        model, evaluator = self._pipeline.model, self._evaluator
        assert evaluator is not None  # noqa: S101 - from start on
        earlier = vars(model).get("forward")  # of another library, whose loop calls the model, or one that refuses

        @functools.wraps(model.forward)  # by whose signature libraries decide what they pass, such as a mask
        def forward(*args: Any, **kwargs: Any) -> Tensor:
            batch = self._called_with(args, kwargs)
            value = args[0] if args else self._pipeline.inputs(batch)
            with _replaced_forward(model, earlier), self._sending_messages():  # a stage may call the model's own
                return evaluator.evaluate(value, batch)

        with _replaced_forward(model, forward):
            yield

    def check_messages(self) -> None:
        """Check that no step has failed while stages sent messages to each other.

        Raises:
            MisuseError: One has.
        """
        job = current_job()
        if job is not None and job.has_lost_messages:
            raise MisuseError(
                "a step has failed between its stages, and the program has caught the error: other ranks would take "
                "what this one sends next for the rest of that step. Let the error end the run, and resume it from a "
                "checkpoint"
            )

    @contextmanager
    def _sending_messages(self) -> Iterator[None]:
        """In this context stages send messages to each other, of which an error leaves some on their way."""
        self.check_messages()
        with noting_failed_steps(sends_messages=True):
            yield

    def _called_with(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what the model is called with in an evaluation, as ``compute`` gets it.

        Raises:
            MisuseError: A part of it would reach no layer.
        """
        if len(args) + len(kwargs) > 1 and (self._pipeline.compute is None or (args and kwargs)):
            names = [*_names_of_positional(self._pipeline.model, len(args)), *(f"{name}=" for name in kwargs)]
            reason, advice = (
                ("calls layers with one tensor after the other", "pass compute= to Pipeline, which gets all arguments")
                if self._pipeline.compute is None
                else (
                    "passes either positional arguments to compute, as a tuple, or keywords, as a dict",
                    "call the model with one kind of them",
                )
            )
            raise MisuseError(
                f"{type(self._pipeline.model).__name__} was called with {', '.join(names)} in an evaluation step, and "
                f"its pipeline {reason}: {advice}"
            )
        if not args:
            return kwargs
        return args[0] if len(args) == 1 else args

    def take_shared_gradients(self) -> list[Tensor | None]:
        """Remove the gradients of parameters of several ranks, which are sums of earlier batches, and return them."""
        parameters = [shared.parameter for shared in self._stages.shared]
        gradients = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        return gradients

    @torch.no_grad()
    def sum_shared_gradients(self, earlier: Sequence[Tensor | None]) -> None:
        """Sum the gradients of parameters of several ranks, so that each of them steps alike; collective.

        Args:
            earlier: Gradients of these parameters to add, which are such sums already.
        """
        for shared, of_earlier in zip(self._stages.shared, earlier, strict=True):
            parameter = shared.parameter
            if self._links.position not in shared.positions or not parameter.requires_grad:
                continue
            gradient = parameter.grad
            local = torch.zeros_like(local_tensor(parameter)) if gradient is None else local_tensor(gradient)
            # The last element is the number of ranks with a gradient.  Only those without one read it, to step as one
            # device does: a message on the host would make the ranks wait for each other in every step.
            count = local.new_full((1,), 0 if gradient is None else 1)
            summand = torch.cat([local.flatten(), count]).to(self._links.device)
            # In the order of the ranks: the sum is the same on each, bit for bit.
            total = gather_tensors(summand, group=self._groups_of_shared[shared.positions]).sum(dim=0)
            if gradient is not None or total[-1] > 0:
                local.copy_(total[:-1].view_as(local))
                parameter.grad = with_local(parameter, local) if gradient is None else gradient
            if of_earlier is not None:
                parameter.grad = of_earlier if parameter.grad is None else parameter.grad.add_(of_earlier)

    @property
    def counted_elsewhere(self) -> set[int]:
        """The ids of the parameters of this rank that an earlier one has too."""
        return {id(shared.parameter) for shared in self._stages.shared if self._links.position in shared.positions[1:]}

    def end(self, *, failed: bool) -> None:
        """Release the layers, and wait until other ranks have received the last loss.

        Args:
            failed: Whether the run has failed, so that other ranks may receive nothing more.
        """
        self._guards.close()
        if self._runner is not None and not failed:
            self._runner.finish()
        self._runner = self._evaluator = None

    # State

    @torch.no_grad()
    def share_buffers(self) -> None:
        """Overwrite buffers and extra state of each stage's layers by those of its rank, for rank 0; collective.

        A layer may have made a buffer anew in a step, of another shape.
        """
        links = self._links
        for stage, layers in enumerate(self._stages.layers):
            position = stage % len(links.ranks)
            modules = [inner for layer in layers for inner in layer.modules()]
            box = [[_state_beside_parameters(inner) for inner in modules] if position == links.position else None]
            dist.broadcast_object_list(box, links.ranks[position], group=links.collective_group, device=links.device)
            for inner, (outlines, extra) in zip(modules, box[0] or [], strict=True):
                if extra is not None and position != links.position:
                    inner.set_extra_state(extra)
                for name, (shape, dtype) in outlines.items():
                    buffer = getattr(inner, name)
                    if buffer is None or (buffer.shape, buffer.dtype) != (shape, dtype):
                        buffer = torch.empty(shape, dtype=dtype, device=links.device)
                        setattr(inner, name, buffer)
                    links.from_position(buffer, position)


def _state_beside_parameters(layer: Module) -> tuple[dict[str, tuple[torch.Size, torch.dtype]], Any]:
    """Return shapes and dtypes of a layer's own buffers by name, and its extra state, None without one."""
    outlines = {name: (buffer.shape, buffer.dtype) for name, buffer in layer.named_buffers(recurse=False)}
    has_extra = type(layer).get_extra_state is not torch.nn.Module.get_extra_state
    return outlines, layer.get_extra_state() if has_extra else None


def _state_of(modules: Mapping[str, Module]) -> dict[str, tuple[Any, int]]:
    """Return what shows a change of the state of modules: objects and versions by name; buffers, and metric objects."""
    state: dict[str, tuple[Any, int]] = {}
    module: Any
    for prefix, module in modules.items():
        for name, buffer in module.named_buffers(recurse=False):
            state[f"{prefix}.{name}".lstrip(".")] = buffer, buffer._version  # noqa: SLF001 - torch's, for such checks
        if is_metric(module):
            state[prefix] = module, module.update_count
    return state


def _changed_name(before: Mapping[str, tuple[Any, int]], after: Mapping[str, tuple[Any, int]]) -> str | None:
    """Return the first name with another object or version in a state, None if there is none."""
    for name, (value, version) in before.items():
        now, latest = after.get(name, (None, 0))
        if now is not value or latest != version:
            return name
    return None


def _attributes_of(modules: Mapping[str, Module]) -> dict[str, tuple[Any, int]]:
    """Return the tensors and numbers that modules have as plain attributes, with the versions of tensors, by name."""
    return {
        f"{prefix}.{name}".lstrip("."): (value, value._version if isinstance(value, torch.Tensor) else 0)  # noqa: SLF001 - as above
        for prefix, module in modules.items()
        for name, value in vars(module).items()
        if isinstance(value, torch.Tensor) or type(value) in (int, float)
    }


def _changed_attribute(before: Mapping[str, tuple[Any, int]], after: Mapping[str, tuple[Any, int]]) -> str | None:
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


@contextmanager
def _replaced_forward(module: Module, forward: Callable[..., Any] | None) -> Iterator[None]:
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
def _refusing_to_clip(ranks: int) -> Iterator[None]:
    """In this context torch's function that clips by a norm refuses gradients of stages, of which it sees some."""
    clip = utils.clip_grad_norm_

    @functools.wraps(clip)
    def refuse(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if any(isinstance(parameter, DTensor) for parameter in parameters):
            raise MisuseError(
                "torch.nn.utils.clip_grad_norm_ takes the norm of the gradients of one rank, and the stages of the "
                f"pipeline are on {ranks}: pass gradient_clip_val to the Trainer or to loop.setup, or call "
                "strategy.clip_gradients(optimizer, value)"
            )
        return clip(parameters, *args, **kwargs)

    utils.clip_grad_norm_ = utils.clip_grad.clip_grad_norm_ = refuse
    try:
        yield
    finally:
        utils.clip_grad_norm_ = utils.clip_grad.clip_grad_norm_ = clip


def _names_of_positional(model: Module, count: int) -> list[str]:
    """Return the names of the first arguments of a model."""
    names = [name for name, parameter in inspect.signature(model.forward).parameters.items() if parameter.kind < 2]
    return [*names, *(f"argument {number}" for number in range(len(names) + 1, count + 1))][:count]


def _call_in_order(layers: Sequence[Module], value: Any, _batch: Any) -> Any:
    for layer in layers:
        value = layer(value)
    return value
