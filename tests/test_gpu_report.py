"""The report of a GPU, as far as it goes without one."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

PROGRAM = Path(__file__).parents[1] / "benchmarks" / "gpu" / "run.py"


def run(out, *arguments):
    command = [sys.executable, str(PROGRAM), "--out", str(out), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=170, check=False)


@pytest.mark.slow
def test_a_dry_run_collects_the_tests_and_measures_with_a_tiny_network(tmp_path):
    done = run(tmp_path, "--dry-run", "--only", "tests", "--only", "checkpoints")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    tests, checkpoints = report["parts"]
    assert report["dry_run"] is True
    assert report["machine"]["torch"] == torch.__version__
    assert "tests collected" in tests["summary"]
    assert len(checkpoints["figures"]) == 7
    table = (tmp_path / "report.md").read_text()
    assert "| checkpoints | passed |" in table
    assert "loading" in table


def test_a_part_beyond_its_time_costs_only_itself(tmp_path):
    program = runpy.run_path(str(PROGRAM))
    sleeping = program["Part"](name="sleeping", command=["-c", "import time; time.sleep(100)"], seconds=0.5)
    broken = program["Part"](name="broken", command=["-c", "raise SystemExit('it broke')"], seconds=60)
    run_part = program["run_part"]
    outcomes = [run_part(part, tmp_path, dict(os.environ), 60) for part in (sleeping, broken)]
    outcomes.append(run_part(sleeping, tmp_path, dict(os.environ), -1))
    assert [outcome.state for outcome in outcomes] == ["timed out", "failed", "not run"]
    program["write_report"](tmp_path, {}, outcomes, dry_run=False)
    assert "## broken: failed\n\n```\nit broke\n```" in (tmp_path / "report.md").read_text()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_without_a_gpu_it_says_what_to_do(tmp_path):
    done = run(tmp_path)
    assert done.returncode == 2
    assert "--dry-run does what needs none" in done.stdout
