"""The parts that a strategy is composed of, and the little that it asks of whoever runs it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from dstrat.interfaces.accelerator import Accelerator
    from dstrat.interfaces.checkpoint_io import CheckpointIO
    from dstrat.interfaces.cluster import ClusterEnvironment
    from dstrat.interfaces.launcher import Launcher
    from dstrat.interfaces.optimization import Optimization
    from dstrat.interfaces.precision import ClipAlgorithm, Precision


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """What a strategy is composed of; None where a part is lacking.

    Attributes:
        accelerator: The hardware.
        parallel_devices: The devices of this machine that the job uses, one for each local rank.
        cluster_environment: Where the job runs.
        checkpoint_io: How checkpoints reach storage.
        precision_plugin: The dtypes and what follows from them.
        launcher: What starts the processes; None runs everything in the calling process.
    """

    accelerator: Accelerator | None = None
    parallel_devices: tuple[torch.device, ...] | None = None
    cluster_environment: ClusterEnvironment | None = None
    checkpoint_io: CheckpointIO | None = None
    precision_plugin: Precision | None = None
    launcher: Launcher | None = None

    def without_names(self) -> Parts:
        """Return the parts that are objects: a user may have written others as an alias or a class."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return Parts(**{name: value for name, value in values.items() if not isinstance(value, str | type)})


class TrainerLike(Protocol):
    """What a strategy's ``setup`` needs to know of whoever runs it: the Trainer, or somebody's own loop."""

    @property
    def is_fitting(self) -> bool:
        """Whether the module is going to be trained, so that gradients and optimizers are needed."""

    @property
    def accumulate_grad_batches(self) -> int:
        """Number of batches whose gradients are summed before an optimizer step."""

    @property
    def gradient_clip_val(self) -> float | None:
        """Largest norm or value of gradients; None does not clip."""

    @property
    def gradient_clip_algorithm(self) -> ClipAlgorithm:
        """How gradients are clipped."""

    def configure_optimizers(self) -> Optimization:
        """Create the optimizers of the module as it is now, on its device, and their schedulers."""
