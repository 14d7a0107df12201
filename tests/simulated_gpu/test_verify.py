"""``dstrat verify`` beside GPUs: its processes are forked, which torch refuses after a backward pass."""

from __future__ import annotations

from click.testing import CliRunner

from dstrat.cli.main import commands


def test_a_layout_is_verified_on_processors_beside_gpus():
    factory = "packages.mesh.tests.test_verify:split"
    shown = CliRunner().invoke(commands, ["verify", factory, "--strategy", "mesh(tp=2)", "--devices", "2"])
    assert shown.exit_code == 0, (shown.output, shown.exception)
    assert shown.stdout.splitlines()[-1] == "mesh(tp=2) on 2 CPU processes is the same as one device, up to 1e-05"
