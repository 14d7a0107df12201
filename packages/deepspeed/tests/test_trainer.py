"""The strategy through the Trainer, in a script that is started as a user starts it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import deepspeed_program
import pytest

PROGRAM = Path(deepspeed_program.__file__)
NAMES = ("deepspeed_stage_1", "deepspeed_stage_3")


def on_one_device(cluster, out):
    deepspeed_program.train(out, "single_device", 1)


def test_fit_validate_test_and_predict_give_what_one_device_gives_and_print_nothing(ranks, tmp_path):
    ranks(on_one_device, 1, out=str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-W", "error", str(PROGRAM), str(tmp_path), "2", *NAMES],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(PROGRAM.parents[3])},
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    expected = json.loads((tmp_path / "single_device.0.json").read_text())
    for name in NAMES:
        for rank in (0, 1):
            mine = json.loads((tmp_path / f"{name}.{rank}.json").read_text())
            assert mine["losses"] == pytest.approx(expected["losses"], rel=1e-5)
            assert mine["logged"] == pytest.approx(expected["logged"], rel=1e-5)
            assert mine["predictions"] == pytest.approx(expected["predictions"], rel=1e-4, abs=1e-5)
            assert mine["lr"] == expected["lr"]
