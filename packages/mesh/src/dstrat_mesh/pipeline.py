"""Pipeline of a run: the stages of this rank, their steps, and their share of the module's state."""

from __future__ import annotations

import functools
import inspect
import itertools
import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from dstrat.errors import ConflictError, DstratError, MisuseError
from dstrat.interfaces.pipeline import Pipeline, batch_size, split_batch
from dstrat.parallel.internals import new_connections
from dstrat.parallel.optimizer_checks import find_coupling
from dstrat.parallel.shards import local_tensor, with_local
from dstrat.training.metrics.metric_objects import is_metric
from dstrat.training.module.compiling import plain_name, wrapped_module
from dstrat_fsdp.parameters import made_on_meta
from dstrat_mesh.axes import PIPELINE
from dstrat_mesh.runner import Links, StageRunner
from dstrat_mesh.stages import Stages, free_parameters

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
        MisuseError: It defines no pipeline, or has statistics of batches.
    """
    name = type(module).__name__
    if not hasattr(module, "configure_pipeline"):
        raise MisuseError(
            f"{name} has no configure_pipeline, which a pipeline (pp) needs: define it to return "
            "dstrat.Pipeline(model=self.net, loss=lambda output, batch: mse_loss(output, batch[1]))"
        )
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


def number_of_layers(module: Any) -> int:
    """Return the number of layers of a module's pipeline; 0 if it has none whose order is known."""
    try:
        return len(pipeline_of(module).chain) if hasattr(module, "configure_pipeline") else 0
    except DstratError:  # also from hooks of modules that are defined for any model
        return 0


# Of modules that are estimated for many layouts, and do not change.
_stages: WeakKeyDictionary[Module, dict[tuple[int, int], Stages]] = WeakKeyDictionary()
_layers: WeakKeyDictionary[Module, dict[tuple[int, int], list[nn.ModuleList]]] = WeakKeyDictionary()


def estimated_stages(module: Module, ranks: int, stages_per_rank: int) -> Stages:
    """Return the stages of a module that is estimated, as :meth:`Stages.of` does.

    Args:
        module: The module, with a pipeline.
        ranks: Number of ranks along the pipeline.
        stages_per_rank: Number of stages of each.
    """
    of_module, key = _stages.setdefault(module, {}), (ranks, stages_per_rank)
    if key not in of_module:
        of_module[key] = Stages.of(module, pipeline_of(module), ranks, stages_per_rank)
    return of_module[key]


def estimated_layers(module: Module, ranks: int, stages_per_rank: int) -> list[nn.ModuleList]:
    """Return the layers of each rank of a module that is estimated; the arguments are as before."""
    of_module, key = _layers.setdefault(module, {}), (ranks, stages_per_rank)
    if key not in of_module:
        stages = estimated_stages(module, ranks, stages_per_rank)
        positions = range(ranks)
        of_module[key] = [nn.ModuleList(itertools.chain(*stages.layers_at(position))) for position in positions]
    return of_module[key]


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
    ) -> None:
        self._module, self._schedule, self._loss_dtype = module, schedule, loss_dtype
        self._pipeline = pipeline_of(module)
        check_not_compiled(module, self._pipeline, schedule)
        self._stages = Stages.of(module, self._pipeline, axes.pp, schedule.stages_per_rank)
        groups = axes.groups(PIPELINE)
        num_new = 3 if schedule.stages_per_rank > 1 else 1
        with new_connections():
            opened = [dist.new_subgroups_by_enumeration(groups, timeout=timeout)[0] for _ in range(num_new)]
            # Those of shared parameters have no other ranks: the first messages in a group of NCCL need all of them.
            self._groups_of_shared: dict[tuple[int, ...], Any] = {}
            for positions in sorted({shared.positions for shared in self._stages.shared}):
                ranks = [[of_pipeline[position] for position in positions] for of_pipeline in groups]
                group, _ = dist.new_subgroups_by_enumeration(ranks, timeout=timeout)
                self._groups_of_shared[positions] = group
        self.links = Links(
            position=mesh.get_local_rank(PIPELINE),
            ranks=next(group for group in groups if dist.get_rank() in group),
            groups=[mesh.get_group(PIPELINE), *opened],
            device=device,
        )
        self._layers_of_stages = self._stages.layers_at(self.links.position)
        self.layers = self._stages.skeleton(self.links.position)
        self._runner: StageRunner | None = None
        self._evaluator: StageRunner | None = None

    def free_other_ranks(self) -> set[Module]:
        """Free the parameters of other ranks; return their modules that were made on the meta device."""
        foreign = self._stages.other_layers(self.links.position)
        on_meta = made_on_meta(foreign)
        free_parameters(foreign)
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
        chain = self._pipeline.compute or _call_in_order
        layers, loss_of = self._layers_of_stages, self._pipeline.loss
        last = len(layers) - 1 if self.links.is_last else None

        present = {inner for of_stage in self._stages.layers for layer in of_stage for inner in layer.modules()}
        outside = {name: inner for name, inner in self._module.named_modules() if inner not in present}

        def compute(chunk: int, value: Any, batch: Any) -> Any:
            return chain(layers[chunk], value, batch)

        def compute_loss(chunk: int, value: Any, batch: Any) -> Any:
            output = compute(chunk, value, batch)
            if chunk != last:
                return output
            before = _state_of(outside)
            loss = loss_of(output, batch)
            _check_unchanged(before, _state_of(outside))
            return loss

        common = self.links, self._schedule, self._loss_dtype
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
        pipeline, device = self._pipeline, self.links.device
        microbatches = split_batch(batch, self._schedule.microbatches)
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
        inputs = [pipeline.inputs(microbatch) for microbatch in microbatches]
        if not self.links.is_last:
            scale(torch.zeros((), device=device))  # the last rank's scale adapts with its losses, and this one alike
        with capture_logs() as logged:
            loss = self._runner.train(
                inputs,
                microbatches,
                factors,
                scale if factor is None else lambda loss: scale(loss * factor),
                before_backward,
                after_weights,
                tuple(parameter.requires_grad for parameter in self._module.parameters()),
            )
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

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """In this context the pipeline's model computes with all stages."""
        model, evaluator = self._pipeline.model, self._evaluator
        assert evaluator is not None  # noqa: S101 - from start on
        earlier = model.__dict__.get("forward")  # of another library, whose loop calls the model

        def restore() -> None:
            del model.forward
            if earlier is not None:
                model.forward = earlier

        @functools.wraps(model.forward)  # by whose signature libraries decide what they pass, such as a mask
        def forward(*args: Any, **kwargs: Any) -> Tensor:
            batch = self._called_with(args, kwargs)
            value = args[0] if args else self._pipeline.inputs(batch)
            restore()  # a stage may call the model's own
            try:
                return evaluator.evaluate(value, batch)
            finally:
                model.forward = forward

        model.forward = forward
        try:
            yield
        finally:
            restore()

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

    @torch.no_grad()
    def sum_shared_gradients(self) -> None:
        """Sum the gradients of parameters of several ranks, so that each of them steps alike; collective."""
        position, ranks = self.links.position, self.links.ranks
        for shared in self._stages.shared:
            parameter = shared.parameter
            if position not in shared.positions or not parameter.requires_grad:
                continue
            gradient = parameter.grad
            local = torch.zeros_like(local_tensor(parameter)) if gradient is None else local_tensor(gradient)
            # The last element is the number of ranks with a gradient.  Only those without one read it, to step as one
            # device does: a message on the host would make the ranks wait for each other in every step.
            count = local.new_full((1,), 0 if gradient is None else 1)
            summands = {position: torch.cat([local.flatten(), count]).to(self.links.device)}
            exchange, group = [], self._groups_of_shared[shared.positions]
            for other in shared.positions:
                if other != position:
                    summands[other] = torch.empty_like(summands[position])
                    exchange.append(dist.P2POp(dist.isend, summands[position], ranks[other], group=group))
                    exchange.append(dist.P2POp(dist.irecv, summands[other], ranks[other], group=group))
            for work in dist.batch_isend_irecv(exchange):
                work.wait()
            # In the order of the ranks: the sum is the same on each, bit for bit.
            total = torch.stack([summands[other] for other in shared.positions]).sum(dim=0)
            if gradient is not None or total[-1] > 0:
                local.copy_(total[:-1].view_as(local))
                parameter.grad = with_local(parameter, local) if gradient is None else gradient

    @property
    def counted_elsewhere(self) -> set[int]:
        """The ids of the parameters of this rank that an earlier one has too."""
        return {id(shared.parameter) for shared in self._stages.shared if self.links.position in shared.positions[1:]}

    def end(self, *, failed: bool) -> None:
        """Release the layers, and wait until other ranks have received the last loss.

        Args:
            failed: Whether the run has failed, so that other ranks may receive nothing more.
        """
        if self._runner is not None and not failed:
            self._runner.finish()
        self._runner = self._evaluator = None

    # State

    @torch.no_grad()
    def share_buffers(self) -> None:
        """Overwrite buffers and extra state of each stage's layers by those of its rank, for rank 0; collective.

        A layer may have made a buffer anew in a step, of another shape.
        """
        links = self.links
        for stage, layers in enumerate(self._stages.layers):
            position = stage % len(links.ranks)
            modules = [inner for layer in layers for inner in layer.modules()]
            box = [[_state_beside_parameters(inner) for inner in modules] if position == links.position else None]
            dist.broadcast_object_list(box, links.ranks[position], group=links.groups[0], device=links.device)
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


def _check_unchanged(before: Mapping[str, tuple[Any, int]], after: Mapping[str, tuple[Any, int]]) -> None:
    """Check that a loss has not changed state outside of the layers.

    Raises:
        MisuseError: It has.
    """
    for name, (value, version) in before.items():
        now, latest = after.get(name, (None, 0))
        if now is not value or latest != version:
            raise MisuseError(
                f"the loss of the pipeline has changed {name!r}, which only the ranks of the last stage would have, "
                "and checkpoints and logs take that of rank 0: update metrics in validation_step, and keep a buffer in "
                "the forward of a layer of the pipeline"
            )


def _names_of_positional(model: Module, count: int) -> list[str]:
    """Return the names of the first arguments of a model."""
    names = [name for name, parameter in inspect.signature(model.forward).parameters.items() if parameter.kind < 2]
    return [*names, *(f"argument {number}" for number in range(len(names) + 1, count + 1))][:count]


def _call_in_order(layers: Sequence[Module], value: Any, _batch: Any) -> Any:
    for layer in layers:
        value = layer(value)
    return value
