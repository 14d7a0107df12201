"""Weights under the names of files, while a model is trained."""

from __future__ import annotations

import gc
import json
import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="this environment has no transformers: nox -s neighbours has")

import torch
from safetensors.torch import load_file, save_file
from tests.live_bytes import LiveBytes
from tests.warm_program import WarmProgram
from tests.warm_ranks import run_in_ranks

import dstrat
from dstrat import Callback
from dstrat.errors import MisuseError, RequestError
from dstrat.parallel.internals import RecordedCollectives
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


def deep_llama():
    return small.llama(num_hidden_layers=8)


def deep_experts():
    return small.balanced_experts(num_hidden_layers=8)


class Measured(Callback):
    """Writes the memory and the bytes that a stream at the end of a fit takes, in each process."""

    def __init__(self, folder: Path, **options) -> None:
        self.folder, self.options = folder, options

    def on_train_end(self, trainer, module):
        gc.collect()
        received = 0
        with LiveBytes() as live, RecordedCollectives() as recorded:
            for _, tensor in stream_pretrained(module, trainer.strategy, **self.options):
                received += tensor.nbytes
        sent = sum(one.sent for one in recorded.collectives if one.kind != "broadcast")  # of names
        path = self.folder / f"measured-{trainer.global_rank}.json"
        path.write_text(json.dumps([received, live.largest, sent]))


@pytest.mark.parametrize(
    ("model", "strategy"),
    [
        pytest.param(deep_llama, FSDPStrategy(start_method="fork"), id="fsdp"),
        pytest.param(deep_experts, FSDPStrategy(start_method="fork"), id="experts"),
        pytest.param(deep_llama, MeshStrategy(pp=2, start_method="fork"), id="pp"),
        pytest.param(deep_llama, MeshStrategy(tp=2, start_method="fork"), id="tp", marks=pytest.mark.variant),
        pytest.param(deep_llama, "deepspeed", id="deepspeed"),
    ],
)
def test_a_stream_holds_one_block_and_sends_each_tensor_once(tmp_path, model, strategy):
    if strategy == "deepspeed":
        pytest.importorskip("deepspeed", reason="this environment has no DeepSpeed")
        from dstrat_deepspeed import DeepSpeedStrategy

        config = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}  # small ones are sharded
        strategy = DeepSpeedStrategy(config=config, start_method="fork")
    module = model()
    sizes = [parameter.nbytes for parameter in module.parameters()]
    block = sum(parameter.nbytes for parameter in module.model.layers[0].parameters())
    small.train(tmp_path, strategy, 2, model=module, callbacks=[Measured(tmp_path)])
    # The one that the loop has, and the next, which is gathered, are beside the block.
    limits = block + 2 * max(sizes), 2 * max(sizes)
    for rank, limit in enumerate(limits):
        received, live, sent = json.loads((tmp_path / f"measured-{rank}.json").read_text())
        assert received == (0 if rank else sum(sizes))
        assert live <= limit + 1024 < sum(sizes) / 3  # names
        if isinstance(strategy, FSDPStrategy):
            sent *= 2  # as each rank sends its half
        assert sum(sizes) / 2 < sent < 1.001 * sum(sizes)


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
    output = WarmProgram(program, *options, "--out", str(tmp_path)).run()
    assert re.findall("^step (.): 'def ", output, re.MULTILINE) == ["2", "4", "4"]
    trained, received = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "engine"))
    assert trained.keys() == received.keys()
    assert all(torch.equal(received[name], trained[name]) for name in trained)


class Slices(Callback):
    """Writes what the two ranks of an engine get at the end of a fit."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_end(self, trainer, module):
        for rank in range(2):
            stream = stream_pretrained(module, trainer.strategy, tensor_parallel=(rank, 2))
            weights = {name: tensor.cpu().clone() for name, tensor in stream}
            if trainer.is_global_zero:
                save_file(weights, self.folder / f"slice-{rank}.safetensors")


ENGINE = """
import os, sys
from pathlib import Path
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
from dstrat_transformers.models import stored_tensors, unsaved_names

folder = Path(sys.argv[1])
torch.distributed.init_process_group("gloo")
model = AutoModelForCausalLM.from_pretrained(folder / "model", tp_plan="auto")
unsaved = unsaved_names(model)
local = {
    name: tensor.to_local() if hasattr(tensor, "to_local") else tensor
    for name, tensor in model.state_dict().items()
    if name not in unsaved
}
weights = {name: tensor.detach().contiguous().clone() for name, tensor in stored_tensors(model, local).items()}
save_file(weights, folder / f"engine-{os.environ['RANK']}.safetensors")
torch.distributed.barrier()
os._exit(0)
"""


@pytest.mark.parametrize(
    ("model", "strategy"),
    [
        pytest.param(small.llama, FSDPStrategy(start_method="fork"), id="fsdp"),
        pytest.param(lambda: small.llama(tie_word_embeddings=False), MeshStrategy(pp=2, start_method="fork"), id="pp"),
        pytest.param(small.llama, MeshStrategy(tp=2, start_method="fork"), id="tp"),
        pytest.param(small.balanced_experts, FSDPStrategy(start_method="fork"), id="experts"),
        pytest.param(small.llama, "deepspeed", id="deepspeed"),
    ],
)
def test_an_engine_gets_the_slices_that_transformers_reads_itself(tmp_path, model, strategy):
    if strategy == "deepspeed":
        pytest.importorskip("deepspeed", reason="this environment has no DeepSpeed")
        from dstrat_deepspeed import DeepSpeedStrategy

        strategy = DeepSpeedStrategy(stage=3, start_method="fork")
    small.train(tmp_path, strategy, 2, model=model(), callbacks=[Slices(tmp_path)])
    program = tmp_path / "engine.py"
    program.write_text(ENGINE)
    ended = run_in_ranks(program, str(tmp_path), devices=2)
    assert ended.returncode == 0, ended.stderr[-3000:]
    for rank in range(2):
        streamed = load_file(tmp_path / f"slice-{rank}.safetensors")
        expected = load_file(tmp_path / f"engine-{rank}.safetensors")
        assert streamed.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(streamed[name], tensor), name


@pytest.mark.parametrize(
    ("size", "message"),
    [((0, 3), "q_proj has 4 heads, which the 3 ranks"), ((2, 2), r"tensor_parallel=\(2, 2\) is not a rank")],
)
def test_slices_that_no_engine_has_are_an_error(size, message):
    module = small.llama()
    strategy = dstrat.build(strategy="single_device", accelerator="cpu")
    strategy.connect(module)
    with pytest.raises(RequestError, match=message):
        next(stream_pretrained(module, strategy, tensor_parallel=size))


def test_the_error_for_another_model_names_what_streams_it():
    strategy = dstrat.build(strategy="single_device", accelerator="cpu")
    with pytest.raises(MisuseError, match=r"Linear is not a model of transformers: use strategy.stream_weights\(\)"):
        next(stream_pretrained(torch.nn.Linear(1, 1), strategy))
