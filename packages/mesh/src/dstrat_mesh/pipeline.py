"""Pipeline of a run: the stage of this rank, its steps, and its share of the module's state."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from dstrat.checkpoint.portable.shards import holders, local_boxes
from dstrat.errors import ConflictError, MisuseError
from dstrat.interfaces.pipeline import Pipeline, batch_size, split_batch
from dstrat_fsdp.parameters import made_on_meta
from dstrat_fsdp.wrap_policy import layers_with_statistics
from dstrat_mesh.axes import PIPELINE, TENSOR
from dstrat_mesh.schedule import Links, StageRunner
from dstrat_mesh.stages import Stages, free_parameters

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh
    from torch.nn import Module

    from dstrat.interfaces.precision import Precision
    from dstrat.interfaces.strategy import TrainerLike
    from dstrat_mesh.axes import Axes

_logger = logging.getLogger(__name__)


def check_pipeline(module: Module, precision: Precision, trainer: TrainerLike) -> None:
    """Check that a module and its training can have stages.

    Raises:
        MisuseError: It defines no pipeline, or has statistics of batches.
        ConflictError: Its optimization is manual, or the precision scales losses.
    """
    name = type(module).__name__
    if not hasattr(module, "configure_pipeline"):
        raise MisuseError(
            f"{name} has no configure_pipeline, which a pipeline (pp) needs: define it to return "
            "dstrat.Pipeline(model=self.net, loss=lambda output, batch: mse_loss(output, batch[1]))"
        )
    if layers := layers_with_statistics(module):
        raise MisuseError(
            f"{name} has a {type(layers[0]).__name__}, which normalizes over a batch, and a pipeline divides it into "
            "microbatches, so that results would be others: use a layer norm or group norm, or leave pp out"
        )
    if trainer.is_fitting and not getattr(module, "automatic_optimization", True):
        raise ConflictError(
            f"{name} has automatic_optimization=False, and a pipeline runs forward and backward passes together: leave "
            "it out, or leave pp out"
        )
    if precision.compute_dtype is torch.float16:
        raise ConflictError(
            f"precision {precision.flag!r} scales losses, which stages would have to adapt together: choose "
            "bf16-mixed, or leave pp out"
        )


class PipelineRun:
    """The stage of this rank in a run, and its neighbours.

    Args:
        module: The user's module.
        mesh: The mesh of all ranks.
        axes: Its sizes.
        schedule: Order of the passes.
        device: The device of this rank.

    Attributes:
        layers: A module with the layers of this stage only, under their names in the user's module.
    """

    def __init__(self, module: Module, mesh: DeviceMesh, axes: Axes, schedule: str, device: torch.device) -> None:
        self._module, self._axes, self._mesh, self._schedule = module, axes, mesh, schedule
        self._pipeline: Any = module.configure_pipeline()  # type: ignore[operator]  # checked by check_pipeline
        if not isinstance(self._pipeline, Pipeline):
            raise MisuseError(
                f"configure_pipeline of {type(module).__name__} returned a {type(self._pipeline).__name__}: return a "
                "dstrat.Pipeline"
            )
        self._stages = Stages.of(module, self._pipeline, axes.pp)
        groups = axes.groups(PIPELINE)
        backward, _ = dist.new_subgroups_by_enumeration(groups)
        self.links = Links(
            stage=mesh.get_local_rank(PIPELINE),
            ranks=next(group for group in groups if dist.get_rank() in group),
            forward=mesh.get_group(PIPELINE),
            backward=backward,
            device=device,
        )
        self._stage_layers = self._stages.layers[self.links.stage]
        self.layers = self._stages.skeleton(self.links.stage)
        self._runner: StageRunner | None = None
        self._evaluator: StageRunner | None = None

    def free_other_stages(self) -> set[Module]:
        """Free the parameters of other stages; return their modules that were made on the meta device."""
        foreign = self._stages.other_layers(self.links.stage)
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
        loss_of = self._pipeline.loss if self.links.is_last else None

        def compute(value: Any, microbatch: Any) -> Any:
            for layer in self._stage_layers:
                value = layer(value)
            return value if loss_of is None or microbatch is None else loss_of(value, microbatch)

        self._runner = StageRunner(self.links, self._schedule, lambda value, batch: train(compute, value, batch))
        self._evaluator = StageRunner(self.links, self._schedule, lambda value, _: evaluate(compute, value, None))

    # Steps

    def train(
        self,
        batch: Any,
        count: int,
        scale: Callable[[Tensor], Tensor],
        before_backward: Callable[[bool], None],
    ) -> Tensor:
        """Run the passes of a batch, and return its loss; arguments are those of :meth:`StageRunner.train`."""
        assert self._runner is not None  # noqa: S101 - from start on
        microbatches = split_batch(batch, count)
        weigh = self._pipeline.weight or batch_size
        weights = [weigh(microbatch) for microbatch in microbatches]
        total = sum(weights)
        inputs = [self._pipeline.inputs(microbatch) for microbatch in microbatches]
        factors = [weight / total for weight in weights]
        return self._runner.train(inputs, microbatches, factors, scale, before_backward)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """In this context the pipeline's model computes with all stages."""
        model, evaluator = self._pipeline.model, self._evaluator
        assert evaluator is not None  # noqa: S101 - from start on
        model.forward = evaluator.evaluate
        try:
            yield
        finally:
            del model.forward

    def end(self) -> None:
        """Release the layers."""
        self._runner = self._evaluator = None

    # State

    @torch.no_grad()
    def share_buffers(self) -> None:
        """Overwrite the buffers of each stage's layers by those of its rank, as rank 0 writes them; collective."""
        for stage, layers in enumerate(self._stages.layers):
            for layer in layers:
                for buffer in layer.buffers():
                    self.links.from_stage(buffer, stage)

    @torch.no_grad()
    def gather_state(self, state: Mapping[str, Any], module: Module) -> dict[str, Any]:
        """Return the full state of the module on global rank 0, and an empty dict on the others; collective."""
        gathered: dict[str, Any] = {}
        rank, is_first_in_tp = dist.get_rank(), self._mesh.get_local_rank(TENSOR) == 0
        for name, like in module.state_dict(keep_vars=True).items():
            value = state.get(name)
            if not isinstance(like, torch.nn.Parameter):
                gathered[name] = value.cpu() if isinstance(value, torch.Tensor) else value
                continue
            full = torch.zeros(like.shape, dtype=like.dtype, device=self.links.device)
            if isinstance(value, DTensor):
                # A layer that is not split exists in each group of split layers.
                is_writer = is_first_in_tp or TENSOR in (value.device_mesh.mesh_dim_names or ())
                if is_writer and holders(value)[0] == rank:
                    for box in local_boxes(value):
                        position = zip(box.starts, box.tensor.shape, strict=True)
                        full[tuple(slice(start, start + size) for start, size in position)] = box.tensor
            # As bytes, of which each is non-zero on one rank only: exact for every dtype.
            dist.reduce(full.view(-1).view(torch.uint8), 0)
            gathered[name] = full.cpu() if rank == 0 else None
        return gathered if rank == 0 else {}
