"""The program examples/transformers/train.py with each axis of a mesh: one loss for all that read the same batches."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="this environment has no transformers: nox -s neighbours has")

from tests.warm_ranks import run_in_ranks
from transformers import AutoModelForCausalLM

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("llama")]

PROGRAM = Path(__file__).parents[3] / "examples" / "transformers" / "train.py"
CASES = {
    # Not on one device, which shuffles in another order.
    "one reader": ["mesh(tp=2)", "mesh(pp=2, microbatches=4)", "mesh(cp=2)"],
    "two readers": ["mesh(dp_shard=2)", "mesh(dp_replicate=2)", "mesh(ep=2)"],
}


def validation_loss(folder, strategy, *options):
    arguments = [
        "--strategy",
        strategy,
        "--devices",
        "2",
        "--small",
        "--steps",
        "3",
        "--length",
        "32",
        "--learning-rate",
        "0.01",
        "--out",
        str(folder),
        *options,
    ]
    ended = run_in_ranks(PROGRAM, "--accelerator", "cpu", *arguments, devices=2)
    assert ended.returncode == 0, ended.stderr[-3000:]
    AutoModelForCausalLM.from_pretrained(folder / "model")
    return re.search(r"validation loss (\S+) nats", ended.stdout)[1]


@pytest.mark.parametrize("readers", ["two readers", pytest.param("one reader", marks=pytest.mark.variant)])
def test_each_axis_has_the_same_loss(tmp_path, readers):
    options = ["--experts", "4"] if readers == "two readers" else []
    losses = {}
    for number, strategy in enumerate(CASES[readers]):
        folder = tmp_path / str(number)
        folder.mkdir()
        losses[strategy] = validation_loss(folder, strategy, *options)
    assert len(set(losses.values())) == 1, losses
