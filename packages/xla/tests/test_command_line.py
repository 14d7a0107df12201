"""What the command line and the README say of XLA's components."""

import inspect
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from dstrat.cli.doctor import check_devices
from dstrat.cli.main import commands
from dstrat.plugins.catalog import get_catalog
from dstrat_xla import SingleDeviceXLAStrategy, XLAFSDPStrategy, XLASPMDStrategy, XLAStrategy
from dstrat_xla.plugin import dstrat_components

README = Path(__file__).parent.parent.joinpath("README.md").read_text(encoding="utf-8")
OF_EVERY_STRATEGY = {"accelerator", "parallel_devices", "checkpoint_io", "precision_plugin", "kwargs"}


def output_of(*words):
    result = CliRunner().invoke(commands, [*words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_doctor_names_the_runtime_its_version_and_devices():
    texts = {finding.subject: finding.text for finding in check_devices(get_catalog())}
    assert re.fullmatch(r"1 by default \(xla:0\), .*; PJRT_DEVICE CPU, torch_xla 2\.9\S*", texts["accelerator xla"])
    assert texts["accelerator tpu"].startswith("not on this machine: PJRT_DEVICE is 'CPU'")


def test_explain_says_which_strategy_serves_a_general_alias():
    output = output_of("explain", "--strategy", "ddp_spawn", "--accelerator", "xla", "--devices", "1")
    assert re.search(r"strategy +xla ", output)


@pytest.mark.without_torch_xla
@pytest.mark.parametrize("alias", ["single_xla", "xla", "xla_debug", "xla_spmd", "xla_fsdp"])
def test_show_knows_each_strategy(alias):
    output = output_of("show", alias)
    assert re.search(rf"strategy +{alias}\n", output)
    assert "torch_xla>=2.9,<2.10" in output


@pytest.mark.without_torch_xla
@pytest.mark.parametrize("strategy", [SingleDeviceXLAStrategy, XLAStrategy, XLASPMDStrategy, XLAFSDPStrategy])
def test_the_readme_has_each_option(strategy):
    options = inspect.signature(strategy).parameters.keys() - OF_EVERY_STRATEGY
    assert not [name for name in options if f"`{name}`" not in README]


@pytest.mark.without_torch_xla
def test_the_readme_has_each_alias():
    records = dstrat_components()
    assert len(records) == 9
    assert not [name for record in records for name in (record.alias, *record.synonyms) if f"`{name}`" not in README]
