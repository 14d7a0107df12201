"""The report of a GPU, as far as it goes without one."""

import json
import os
import runpy
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from tests.warm_program import WarmProgram

PROGRAM = Path(__file__).parents[1] / "benchmarks" / "gpu" / "run.py"
MEASURE = PROGRAM.with_name("measure.py")


def run(out, *arguments):
    command = [sys.executable, str(PROGRAM), "--out", str(out), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)


@pytest.mark.slow
def test_a_dry_run_measures_with_a_tiny_network_and_writes_a_report(tmp_path):
    done = run(tmp_path, "--dry-run", "--only", "checkpoints")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    [checkpoints] = report["parts"]
    assert report["dry_run"] is True
    assert report["machine"]["torch"] == torch.__version__
    assert len(checkpoints["figures"]) == 7
    table = (tmp_path / "report.md").read_text()
    assert "| checkpoints | passed |" in table
    assert "loading" in table


@pytest.mark.parametrize(
    ("measurement", "names"),
    [
        ("gpt", ["step time of by hand again", "step time of Trainer", "step time of OwnLoop"]),
        ("strategies", ["fsdp: step time, over ddp", "estimate for model_parallel", "estimate for single_device, 32"]),
        ("low-precision", ["float8: difference of the last loss", "float8-rowwise: step time, over bf16-mixed"]),
    ],
)
def test_each_measurement_runs_small_on_the_cpu(measurement, names, tmp_path):
    out = tmp_path / "figures.json"
    shown = WarmProgram(MEASURE, measurement, "--device", "cpu", "--tiny", "--out", str(out)).run()
    figures = [figure["name"] for figure in json.loads(out.read_text())]
    assert len(shown.splitlines()) == len(figures)
    assert [name for name in names if not any(name in figure for figure in figures)] == []


def test_parts_fit_into_nine_minutes_and_collect_every_test_of_a_gpu(tmp_path):
    program = runpy.run_path(str(PROGRAM))
    planned = program["parts"](tmp_path, dry_run=False)
    counted = [part for part in planned if not part.has_what_remains]
    checks = [part.seconds for part in counted if part.checks]
    of_checks = sum(checks) / program["CHECKS_AT_ONCE"] + max(checks)  # at most, in any order
    assert of_checks + sum(part.seconds for part in counted if not part.checks) <= program["LIMIT"] < 540
    assert [part.has_what_remains for part in planned] == sorted(part.has_what_remains for part in planned)
    files = {Path(path).name for path in program["files_with_cuda_tests"]()}
    assert files >= {"test_on_gpus.py", "test_float8.py", "test_cuda.py"}


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


def test_checks_go_on_after_one_that_fails(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(PROGRAM.parent))
    checks = runpy.run_path(str(PROGRAM.with_name("checks.py")))

    def breaks(device):
        """One that fails."""
        raise ValueError("a reason")

    def needs(device):
        """One that needs a GPU."""
        device.require("cuda")

    def sees(device):
        """One that sees something."""
        return "something"

    monkeypatch.setattr(sys, "argv", ["checks", "--device", "cpu", "--out", str(tmp_path / "checks.json")])
    with pytest.raises(SystemExit) as ended:
        checks["run_checks"](breaks, needs, sees)
    assert ended.value.code == 1
    figures = json.loads((tmp_path / "checks.json").read_text())
    program = runpy.run_path(str(PROGRAM))
    assert [(one["name"], program["state_of"](one), one["note"]) for one in figures] == [
        ("One that fails", "failed", "ValueError: a reason"),
        ("One that needs a GPU", "not run", "not run: it needs cuda"),
        ("One that sees something", "passed", "something"),
    ]


def test_what_is_missing_is_put_into_the_folder_of_the_report(tmp_path):
    program = runpy.run_path(str(PROGRAM))
    wheel = tmp_path / "wheels" / "brought_along-1.0-py3-none-any.whl"
    wheel.parent.mkdir()
    metadata = {"METADATA": "Metadata-Version: 2.1\nName: brought-along\nVersion: 1.0\n", "RECORD": ""}
    metadata["WHEEL"] = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("brought_along.py", "")
        for name, text in metadata.items():
            file.writestr(f"brought_along-1.0.dist-info/{name}", text)
    environ = program["make_environment"](tmp_path)
    assert program["missing_requirements"](["brought_along>=1", "torch"], environ) == {"brought_along>=1"}
    assert program["provide_requirements"](tmp_path / "site", wheel.parent, environ) == set()
    assert program["missing_requirements"](["brought_along>=1", "torch"], environ) == set()


def test_a_python_without_torch_is_told_so_in_a_sentence(tmp_path):
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    # -S: without the packages of this Python.
    command = [sys.executable, "-S", str(PROGRAM), "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=environ)
    assert done.returncode == 2, done.stderr
    assert done.stdout == (
        f"{sys.executable} has no torch: run this with a Python that has one for the GPU, such as that of your jobs\n"
    )
