"""What differs between the packages for the kinds of components."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dstrat.plugins.component import Kind


@dataclass(frozen=True, kw_only=True, slots=True)
class KindFacts:
    """What the package for a component of one kind is made of.

    Attributes:
        module: The module with the class.
        ending: How the name of the class ends.
        interface: What it derives from.
        suite: The standard tests.
        summary: Its line in tables.
        usage: How a user asks for it, after ``Trainer(``; the alias takes the place of ``{}``.
    """

    module: str
    ending: str
    interface: str
    suite: str
    summary: str
    usage: str


KIND_FACTS: Mapping[Kind, KindFacts] = {
    "strategy": KindFacts(
        module="strategy",
        ending="Strategy",
        interface="dstrat.GradientSyncStrategy",
        suite="StrategySuite",
        summary="one process per device, gradients averaged after the backward pass",
        usage='strategy="{}", accelerator="cpu", devices=2',
    ),
    "accelerator": KindFacts(
        module="accelerator",
        ending="Accelerator",
        interface="dstrat.Accelerator",
        suite="AcceleratorSuite",
        summary="hardware that the processor stands in for",
        usage='accelerator="{}", devices=1',
    ),
    "precision": KindFacts(
        module="precision",
        ending="Precision",
        interface="dstrat.Precision",
        suite="PrecisionSuite",
        summary="everything in float32",
        usage='precision="{}"',
    ),
    "checkpoint_io": KindFacts(
        module="checkpoint",
        ending="CheckpointIO",
        interface="dstrat.CheckpointIO",
        suite="CheckpointIOSuite",
        summary="one file for each checkpoint",
        usage='plugins="{}"',
    ),
    "cluster_environment": KindFacts(
        module="cluster",
        ending="Environment",
        interface="dstrat.ClusterEnvironment",
        suite="ClusterEnvironmentSuite",
        summary="processes that something else has started",
        usage='plugins="{}"',
    ),
}
