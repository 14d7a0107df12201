"""Differences between package templates by kind of component."""

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
        interface: What a component of the kind is, a public class of dstrat's.
        summary: Its line in tables.
        usage: How a user asks for it, after ``Trainer(``; the alias takes the place of ``{}``.
        more_specific_base: What its class derives from, where that is not the interface itself.
    """

    interface: str
    summary: str
    usage: str
    more_specific_base: str = ""

    @property
    def base(self) -> str:
        """What its class derives from."""
        return self.more_specific_base or self.interface

    @property
    def suite(self) -> str:
        """The standard tests."""
        return f"{self.interface}Suite"

    @property
    def ending(self) -> str:
        """How the name of its class ends."""
        return self.interface.removeprefix("Cluster")


KIND_FACTS: Mapping[Kind, KindFacts] = {
    "strategy": KindFacts(
        interface="Strategy",
        summary="one process per device, gradients averaged after the backward pass",
        usage='strategy="{}", accelerator="cpu", devices=2',
        more_specific_base="GradientSyncStrategy",
    ),
    "accelerator": KindFacts(
        interface="Accelerator",
        summary="hardware that the processor stands in for",
        usage='accelerator="{}", devices=1',
    ),
    "precision": KindFacts(
        interface="Precision",
        summary="everything in float32",
        usage='precision="{}"',
    ),
    "checkpoint_io": KindFacts(
        interface="CheckpointIO",
        summary="one file for each checkpoint",
        usage='plugins="{}"',
    ),
    "cluster_environment": KindFacts(
        interface="ClusterEnvironment",
        summary="processes that something else has started",
        usage='plugins="{}"',
        more_specific_base="ExternalEnvironment",
    ),
}
