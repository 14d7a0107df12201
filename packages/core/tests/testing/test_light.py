"""A plugin that imports torch, or that cannot be imported, is told of."""

import itertools

import pytest

from dstrat.plugins.catalog import refresh_catalog
from dstrat.testing import PluginSuite

NUMBERS = itertools.count()  # what was imported once is not imported again
PLUGIN = """
{imports}
from dstrat.plugins.component import hookimpl

@hookimpl
def dstrat_components():
    return []
"""


@pytest.fixture
def suite(tmp_path, monkeypatch):
    """Installs a distribution with a plugin, and gives its test class."""

    def install(imports):
        name = f"acme_{next(NUMBERS)}"
        package, info = tmp_path / name, tmp_path / f"{name}-1.0.dist-info"
        package.mkdir()
        info.mkdir()
        (package / "__init__.py").touch()
        (tmp_path / "torch.py").touch()  # which a fresh interpreter has imported sooner than the real one
        (package / "plugin.py").write_text(PLUGIN.format(imports=imports))
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[dstrat.v1]\nheavy = {name}.plugin\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        refresh_catalog()
        return type("TestHeavy", (PluginSuite,), {"distribution": name})()

    yield install
    monkeypatch.undo()
    refresh_catalog()


def test_a_plugin_that_imports_torch_is_told_of(suite):
    with pytest.raises(pytest.fail.Exception, match=r"acme_\d+\.plugin imports torch"):
        suite("import torch").test_it_is_light_to_import()


def test_a_plugin_that_cannot_be_imported_is_told_of(suite):
    heavy = suite("import nothing_of_that_name")
    with pytest.raises(pytest.fail.Exception, match="cannot be imported"):
        heavy.test_it_is_light_to_import()
    with pytest.raises(pytest.fail.Exception, match=r"is failed: .*nothing_of_that_name"):
        heavy.test_it_loads()


def test_a_light_plugin_passes(suite):
    light = suite("")
    light.test_an_entry_point_leads_to_it()
    light.test_it_is_light_to_import()
    light.test_it_loads()


def test_a_distribution_without_an_entry_point_is_told_of():
    suite = type("TestNothing", (PluginSuite,), {"distribution": "pluggy"})()
    with pytest.raises(pytest.fail.Exception, match=r"no entry point of 'pluggy' is in the group dstrat\.v1"):
        suite.test_an_entry_point_leads_to_it()
