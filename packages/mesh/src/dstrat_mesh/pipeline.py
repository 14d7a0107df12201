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

from dstrat.errors import DstratError, MisuseError
from dstrat.interfaces.batch import tensors_in
from dstrat.interfaces.pipeline import Pipeline, batch_size, split_batch
from dstrat.parallel.collectives import gather_tensors
from dstrat.parallel.internals import new_connections
from dstrat.parallel.job import current_job
from dstrat.parallel.process_group import noting_failed_steps
from dstrat.parallel.shards import local_tensor, with_local
from dstrat_fsdp.memory import once_per_module
from dstrat_fsdp.parameters import empty_on_meta, made_on_meta, replace_parameters
from dstrat_mesh.axes import PIPELINE
from dstrat_mesh.checks import (
    HiddenWeights,
    attributes_of,
    changed_attribute,
    changed_name,
    check_called,
    check_not_compiled,
    explaining_foreign_weights,
    foreign_weights_error,
    refusing_calls,
    refusing_changes_by_loss,
    refusing_to_clip,
    replaced_forward,
    state_of,
)
from dstrat_mesh.runner import Links, StageRunner
from dstrat_mesh.stages import Stages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager
    from datetime import timedelta

    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh
    from torch.nn import Module

    from dstrat_mesh.axes import Axes
    from dstrat_mesh.schedule import Schedule

_logger = logging.getLogger(__name__)


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
        self._weights: HiddenWeights | None = None
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
        named = zip(itertools.chain(*self._stages.layers), itertools.chain(*self._stages.names), strict=True)
        subjects = {layer: f"{name}, a layer of one stage," for layer, name in named}
        module, model = type(self._module).__name__, type(self._pipeline.model).__name__
        self._weights = HiddenWeights(self._module, subjects, self._links.device, model)
        uncallable = {
            layer: subject
            for layer, subject in subjects.items()
            if any(parameter.is_meta for parameter in layer.parameters())
        }
        if self._pipeline.compute is None:  # which may call the model
            uncallable.setdefault(self._pipeline.model, f"{model}, divided into stages,")
        self._guards.enter_context(refusing_calls(uncallable, model))
        self._guards.enter_context(refusing_to_clip(len(self._links.ranks)))

        def compute(chunk: int, value: Any, batch: Any) -> Any:
            return chain(layers[chunk], value, batch)

        def compute_loss(chunk: int, value: Any, batch: Any) -> Any:
            output = compute(chunk, value, batch)
            if chunk != last:
                return output
            with refusing_changes_by_loss(outside), explaining_foreign_weights(module, model):
                loss = loss_of(output, batch)
            if any(tensor.is_meta for tensor in tensors_in(loss)):
                raise foreign_weights_error(module, model)
            return loss

        common = self._links, self._schedule, self._loss_dtype
        self._runner = StageRunner(*common, lambda *args: train(compute_loss, *args))
        self._evaluator = StageRunner(*common, lambda *args: evaluate(compute, *args))

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
        state = state_of(dict(self.layers.named_modules())) if is_watched else {}
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
        if state and (name := changed_name(state, state_of(dict(self.layers.named_modules())))) is not None:
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
        before = attributes_of(self._outside)
        inputs = [first, *map(self._pipeline.inputs, microbatches[1:])]
        name = changed_attribute(before, attributes_of(self._outside)) if len(inputs) > 1 else None
        if name is not None:
            raise MisuseError(
                f"inputs of the pipeline has changed {name!r}, and is called for all microbatches before the first "
                "loss, which would read the value of the last one: make it a part of the batch, in "
                "on_after_batch_transfer"
            )
        return inputs

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """In this context the pipeline's model computes with all stages, and nothing else with their weights."""
        model, evaluator, weights = self._pipeline.model, self._evaluator, self._weights
        assert evaluator is not None  # noqa: S101 - from start on
        assert weights is not None  # noqa: S101 - likewise
        earlier = vars(model).get("forward")  # of another library, whose loop calls the model, or one that refuses

        @functools.wraps(model.forward)  # by whose signature libraries decide what they pass, such as a mask
        def forward(*args: Any, **kwargs: Any) -> Tensor:
            batch = self._called_with(args, kwargs)
            value = args[0] if args else self._pipeline.inputs(batch)
            # A stage may call the model's own.
            with replaced_forward(model, earlier), showing_weights(), self._sending_messages():
                return evaluator.evaluate(value, batch)

        with weights.hiding() as showing_weights, replaced_forward(model, forward):
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
        self._runner = self._evaluator = self._weights = None

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


def _names_of_positional(model: Module, count: int) -> list[str]:
    """Return the names of the first arguments of a model."""
    names = [name for name, parameter in inspect.signature(model.forward).parameters.items() if parameter.kind < 2]
    return [*names, *(f"argument {number}" for number in range(len(names) + 1, count + 1))][:count]


def _call_in_order(layers: Sequence[Module], value: Any, _batch: Any) -> Any:
    for layer in layers:
        value = layer(value)
    return value
