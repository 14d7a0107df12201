"""The aliases through the Trainer, in scripts that are started as a user starts them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from packages.fsdp.tests import fsdp_program

PROGRAM = Path(fsdp_program.__file__)
ROOT = PROGRAM.parents[3]


def run_script(out, *runs):
    """Run the program with these arguments for the Trainer, one after the other in one interpreter."""
    order = json.dumps({"out": str(out), "runs": list(runs)})
    done = subprocess.run(
        [sys.executable, "-W", "error", str(PROGRAM), order],
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
        cwd=out,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    """What one device without any communication gives."""
    out = tmp_path_factory.mktemp("one_device")
    fsdp_program.run(out, "single", devices=1, strategy="single_device")
    return json.loads((out / "single.0.json").read_text())


def check(out, name, ranks, expected):
    for rank in range(ranks):
        found = json.loads((out / f"{name}.{rank}.json").read_text())
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-6)
        assert found["val_loss"] == pytest.approx(expected["val_loss"], rel=1e-6)
        for key in {"trained", "fresh"} & found.keys():
            (logged, predictions), (expected_logged, expected_predictions) = found[key], expected[key]
            assert logged == pytest.approx(expected_logged, rel=1e-6)
            assert logged["samples"] == fsdp_program.EVALUATED
            assert predictions == pytest.approx(expected_predictions, rel=1e-5, abs=1e-6)


def test_fsdp_gives_what_one_device_gives_also_where_ranks_have_different_numbers_of_batches(tmp_path, one_device):
    names = ("fsdp", "fsdp_cpu_offload", "fsdp_hybrid_shard")
    run_script(tmp_path, *({"name": name, "strategy": name, "devices": 2} for name in names))
    for name in names:
        check(tmp_path, name, 2, one_device)


def test_model_parallel_gives_what_one_device_gives(tmp_path, one_device):
    options = {"tensor_parallel_size": 2}
    run = {"name": "mp", "strategy": None, "devices": 4, "options": options, "splits": True, "shares": 2}
    run_script(tmp_path, run)
    check(tmp_path, "mp", 4, one_device)
