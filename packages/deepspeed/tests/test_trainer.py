"""The strategy through the Trainer, in a script that is started as a user starts it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("deepspeed_program.py")
NAMES = ("deepspeed_stage_1", "deepspeed_stage_3")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What ranks 0 and 1 of each strategy have found, and one device; nothing is printed."""
    out = tmp_path_factory.mktemp("out")
    for strategy, devices in (("single_device", 1), *((name, 2) for name in NAMES)):
        done = subprocess.run(
            [sys.executable, "-W", "error", str(PROGRAM), str(out), strategy, str(devices)],
            capture_output=True,
            text=True,
            timeout=170,
            check=False,
            cwd=out,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout == ""
        assert done.stderr == ""
    return {path.name: json.loads(path.read_text()) for path in out.glob("*.json")}


@pytest.mark.parametrize("name", NAMES)
def test_fit_validate_test_and_predict_give_what_one_device_gives(found, name):
    expected = found["single_device.0.json"]
    for rank in (0, 1):
        mine = found[f"{name}.{rank}.json"]
        assert mine["losses"] == pytest.approx(expected["losses"], rel=1e-5)
        assert mine["logged"] == pytest.approx(expected["logged"], rel=1e-5)
        assert mine["predictions"] == pytest.approx(expected["predictions"], rel=1e-4, abs=1e-5)
        assert mine["lr"] == expected["lr"]
