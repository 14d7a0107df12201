"""The suite for plugins: everything that one distribution offers."""

from __future__ import annotations

from typing import ClassVar

from dstrat.plugins.catalog import get_catalog
from dstrat.plugins.names import normalized
from dstrat.testing.advice import fail
from dstrat.testing.light import check_module_is_light, plugin_modules
from dstrat.testing.standard import standard
from dstrat.testing.suite import Suite


class PluginSuite(Suite):
    """Standard tests of a distribution's plugin; a test class sets :attr:`distribution`.

    Attributes:
        distribution: The name that users write after ``pip install``.
    """

    settings = Suite.settings | {"distribution"}
    distribution: ClassVar[str] = ""

    @standard("basic", "record")
    def test_an_entry_point_leads_to_it(self) -> None:
        if not plugin_modules(self.distribution):
            fail(
                f"no entry point of {self.distribution!r} is in the group dstrat.v1, so that dstrat does not find it",
                cure='write [project.entry-points."dstrat.v1"] in its pyproject.toml, and install it again.',
            )

    @standard("basic", "record")
    def test_it_is_light_to_import(self) -> None:
        for module in plugin_modules(self.distribution):
            check_module_is_light(module)

    @standard("basic", "record")
    def test_it_loads(self) -> None:
        for plugin in get_catalog().plugins:
            if normalized(plugin.distribution) == normalized(self.distribution) and plugin.state != "loaded":
                fail(f"{plugin.label} is {plugin.state}: {plugin.reason}", details=plugin.traceback)
