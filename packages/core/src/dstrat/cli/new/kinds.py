"""What differs between the packages for the kinds of components."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dstrat.plugins.component import Kind


class KindFacts(NamedTuple):
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
        "Strategy",
        "one process per device, gradients averaged after the backward pass",
        'strategy="{}", accelerator="cpu", devices=2',
        "GradientSyncStrategy",
    ),
    "accelerator": KindFacts("Accelerator", "hardware that the processor stands in for", 'accelerator="{}", devices=1'),
    "precision": KindFacts("Precision", "everything in float32", 'precision="{}"'),
    "checkpoint_io": KindFacts("CheckpointIO", "one file for each checkpoint", 'plugins="{}"'),
    "cluster_environment": KindFacts(
        "ClusterEnvironment", "processes that something else has started", 'plugins="{}"', "ExternalEnvironment"
    ),
}
