"""Weights under the names of files, while a model is trained."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="this environment has no transformers: nox -s neighbours has")

import torch
from safetensors.torch import load_file, save_file

import dstrat
from dstrat import Callback
from dstrat.errors import MisuseError
from dstrat_fsdp import FSDPStrategy
from dstrat_mesh import MeshStrategy
from dstrat_transformers import save_pretrained, stream_pretrained

sys.path.insert(0, str(Path(__file__).parent))

import small

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.xdist_group("transformers")]


class Streamed(Callback):
    """Writes what the first process gets at the end of a fit."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_end(self, trainer, module):
        weights = {name: tensor.cpu().clone() for name, tensor in stream_pretrained(module, trainer.strategy)}
        assert bool(weights) == trainer.is_global_zero
        if weights:
            save_file(weights, self.path)


@pytest.mark.parametrize(
    ("model", "strategy"),
    [
        pytest.param(small.llama, FSDPStrategy(start_method="fork"), id="fsdp"),
        pytest.param(small.balanced_experts, FSDPStrategy(start_method="fork"), id="experts"),
        pytest.param(small.llama, MeshStrategy(pp=2, start_method="fork"), id="pp"),
    ],
)
def test_the_stream_has_the_tensors_of_the_files(tmp_path, model, strategy):
    path = tmp_path / "streamed.safetensors"
    small.train(tmp_path, strategy, 2, model=model(), callbacks=[Streamed(path)])
    streamed, expected = load_file(path), load_file(tmp_path / "model" / "model.safetensors")
    assert streamed.keys() == expected.keys()
    assert all(torch.equal(streamed[name], expected[name]) for name in expected)


@pytest.mark.parametrize("model", [small.llama, small.balanced_experts])
def test_the_stream_on_one_device_has_the_tensors_of_the_files(tmp_path, model):
    module = model()
    strategy = dstrat.build(strategy="single_device", accelerator="cpu")
    strategy.connect(module)
    save_pretrained(module, tmp_path)
    assert {name: tensor.shape for name, tensor in stream_pretrained(module, strategy)} == {
        name: tensor.shape for name, tensor in load_file(tmp_path / "model.safetensors").items()
    }


@pytest.mark.slow
def test_the_engine_of_the_example_ends_with_the_weights_of_the_training(tmp_path):
    program = Path(__file__).parents[3] / "examples" / "transformers" / "engine.py"
    options = [
        "--strategy",
        "fsdp",
        "--devices",
        "2",
        "--accelerator",
        "cpu",
        "--small",
        "--steps",
        "4",
        "--every",
        "2",
    ]
    command = [sys.executable, str(program), *options, "--out", str(tmp_path)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert re.findall("^step (.): 'def ", output, re.MULTILINE) == ["2", "4", "4"]
    trained, received = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "engine"))
    assert trained.keys() == received.keys()
    assert all(torch.equal(received[name], trained[name]) for name in trained)


def test_the_error_for_another_model_names_what_streams_it():
    strategy = dstrat.build(strategy="single_device", accelerator="cpu")
    with pytest.raises(MisuseError, match=r"Linear is not a model of transformers: use strategy.stream_weights\(\)"):
        next(stream_pretrained(torch.nn.Linear(1, 1), strategy))
