"""Forked processes beside GPUs, in which torch refuses backward passes if the first process has had one."""

from __future__ import annotations

import subprocess
import sys


def run_script(path, text, *arguments):
    """Run a script, as tests before this one may have had a backward pass in this process; return its lines."""
    path.write_text(text, encoding="utf-8")
    command = [sys.executable, str(path), *arguments]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=300).stdout.splitlines()


VERIFY = """
from dstrat.cli.main import commands
from dstrat.testing import simulated_gpu

simulated_gpu.load()
commands()
"""


def test_a_layout_is_verified_on_processors_beside_gpus(tmp_path):
    factory = "packages.mesh.tests.test_verify:split"
    shown = run_script(tmp_path / "run.py", VERIFY, "verify", factory, "--strategy", "mesh(tp=2)", "--devices", "2")
    assert shown[-1] == "mesh(tp=2) on 2 CPU processes is the same as one device, up to 1e-05"


AFTER_A_BACKWARD_PASS = """
import torch
from dstrat import OwnLoop, build
from dstrat.errors import LaunchError
from dstrat.testing import simulated_gpu

simulated_gpu.load()
loop = OwnLoop(build(strategy="ddp_fork", accelerator="cpu", devices=2))
for _ in range(2):
    try:
        print(loop.launch(lambda loop: loop.strategy.world_size))
    except LaunchError as error:
        print(error)
    torch.ones(1, requires_grad=True).sum().backward()
"""


def test_ranks_are_not_forked_after_a_backward_pass_beside_gpus(tmp_path):
    before, after = run_script(tmp_path / "run.py", AFTER_A_BACKWARD_PASS)
    assert before == "2"
    assert after.startswith("start_method='fork' cannot be used after a backward pass in this process beside a GPU")
