"""The suite for cluster environments."""

from __future__ import annotations

from dstrat.testing.light import check_light
from dstrat.testing.record import check_record
from dstrat.testing.standard import standard
from dstrat.testing.suite import Suite


class ClusterEnvironmentSuite(Suite):
    """Standard tests of a cluster environment; a test class sets ``alias``."""

    kind = "cluster_environment"

    @standard("basic", "record")
    def test_its_plugin_is_light_to_import(self) -> None:
        check_light(self.offer)

    @standard("basic", "record")
    def test_its_record_is_complete_and_true(self) -> None:
        check_record(self.offer)
