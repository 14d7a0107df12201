"""Reports of torch_xla that strategies turn on."""

import os
from pathlib import Path

import pytest
from packages.xla.tests.rank_fits import begin, fit, loader
from tests.ranks import in_ranks

from dstrat_xla import SingleDeviceXLAStrategy, XLASPMDStrategy


def reported(cluster, strategy, path):
    """Return what a training writes to the standard error."""
    begin()
    with Path(path).open("w", encoding="utf-8") as file:
        os.dup2(file.fileno(), 2)
    fit(strategy, data=loader(1))
    return Path(path).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("strategy", "reports"),
    [
        ("xla", False),
        ("xla_debug", True),
        (SingleDeviceXLAStrategy(debug=True), True),
        (XLASPMDStrategy(debug=True), True),
    ],
)
def test_debug_reports_compilations(tmp_path, strategy, reports):
    (output,) = in_ranks(reported, 1, strategy=strategy, path=str(tmp_path / "output"))
    assert ("Compilation Analysis" in output) is reports
