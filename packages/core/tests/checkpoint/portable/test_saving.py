"""Saving and loading by one process."""

import json
import os
import random
import subprocess
import sys

import numpy as np
import pytest
import torch

from dstrat.checkpoint.portable.checkpoint_io import PortableCheckpointIO
from dstrat.checkpoint.portable.format import DTYPES
from dstrat.errors import CheckpointError

MIB = 1024 * 1024
MEASURES_MEMORY = """
import sys, torch
from pathlib import Path
from dstrat.checkpoint.portable.checkpoint_io import PortableCheckpointIO

def memory(name):
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    Path("/proc/self/clear_refs").write_text("5")
    return int(lines[name].split()[0]) * 1024

io = PortableCheckpointIO()
io.save_checkpoint({}, sys.argv[1] + "first")
tensors = {str(number): torch.ones(4 * 1024 * 1024) for number in range(20)}  # 320 MiB
before = memory("VmRSS")
io.save_checkpoint(tensors, sys.argv[1])
print(memory("VmHWM") - before)
"""


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def random_tensor(dtype, shape):
    count = torch.empty(shape, dtype=dtype).numel()
    size = torch.empty((), dtype=dtype).element_size()
    if dtype == torch.bool:
        return torch.randint(0, 2, shape).bool()
    return torch.randint(0, 256, (count * size,), dtype=torch.uint8).view(dtype).reshape(shape)


def same_bytes(one, other):
    def flat(tensor):
        return tensor.resolve_conj().contiguous().reshape(-1).view(torch.uint8)

    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(flat(one), flat(other))


def test_a_default_device_is_not_that_of_bytes_on_their_way(io, tmp_path):
    loaded_into = torch.zeros(3, 2)[:, 0]  # read beside it first
    with torch.device("meta"):  # as for a GPU, numpy has no view of its memory
        io.save_checkpoint({"weight": torch.ones(3, device="cpu")}, tmp_path / "c")
        loaded = io.load_checkpoint(tmp_path / "c")
        io.load_into(tmp_path / "c", {"weight": loaded_into})
    assert loaded["weight"].tolist() == loaded_into.tolist() == [1, 1, 1]


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_comes_back_bit_for_bit(io, tmp_path, name):
    dtype = getattr(torch, name)
    tensors = {
        "matrix": random_tensor(dtype, (5, 7)),
        "scalar": random_tensor(dtype, ()),
        "none": random_tensor(dtype, (0, 3)),
    }
    io.save_checkpoint({"state_dict": tensors}, tmp_path / "c")
    loaded = io.load_checkpoint(tmp_path / "c")["state_dict"]
    assert list(loaded) == list(tensors)
    assert all(same_bytes(loaded[name], tensors[name]) for name in tensors)


def test_more_dimensions_than_the_format_has_are_refused(io, tmp_path):
    io.save_checkpoint({"x": torch.zeros([1] * 64)}, tmp_path / "most")
    assert io.load_checkpoint(tmp_path / "most")["x"].dim() == 64
    with pytest.raises(CheckpointError, match="tensor 'x' has 65 dimensions, and the format has at most 64"):
        io.save_checkpoint({"x": torch.zeros([1] * 65)}, tmp_path / "more")
    assert not (tmp_path / "more").exists()


@pytest.mark.parametrize("size", [1, MIB - 1, MIB, MIB + 1, 8 * MIB, 8 * MIB + 13, 17 * MIB])
def test_tensors_of_any_size_come_back(io, tmp_path, size):
    tensors = {
        "before": random_tensor(torch.uint8, (3,)),
        "big": random_tensor(torch.uint8, (size,)),
        "x": torch.ones(5),
    }
    io.save_checkpoint(tensors, tmp_path / "c")
    loaded = io.load_checkpoint(tmp_path / "c")
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)


def test_many_small_tensors_come_back(io, tmp_path):
    tensors = {f"t{i}": torch.full((i % 7,), float(i)) for i in range(3000)}
    io.save_checkpoint(tensors, tmp_path / "c")
    loaded = io.load_checkpoint(tmp_path / "c")
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)


def test_views_come_back_as_what_they_show(io, tmp_path):
    base = torch.randn(40, 30, dtype=torch.complex64)
    tensors = {"t": base.t(), "s": base[::2, 1:7], "c": base.conj(), "r": base.real, "e": torch.ones(1).expand(5, 4)}
    tensors["one"] = torch.ones(2, 13)[:1, :1].reshape(-1)  # contiguous, and its stride is 13
    io.save_checkpoint(tensors, tmp_path / "c")
    loaded = io.load_checkpoint(tmp_path / "c")
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)


def test_tied_weights_are_stored_once_and_stay_tied(io, tmp_path):
    weight = torch.nn.Parameter(torch.randn(512, 512))
    io.save_checkpoint({"a": weight, "b": weight, "c": weight.data[0]}, tmp_path / "c")
    loaded = io.load_checkpoint(tmp_path / "c")
    assert loaded["a"] is loaded["b"]
    assert torch.equal(loaded["b"], weight)
    assert torch.equal(loaded["c"], weight[0])
    assert (tmp_path / "c" / "rank-00000.safetensors").stat().st_size < 1.01 * 513 * 512 * 4


def test_random_state_of_the_rank_comes_back(io, tmp_path):
    state = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    io.save_checkpoint({"epoch": 1, "per_rank": state}, tmp_path / "c")
    drawn = random.random(), np.random.rand(), torch.rand(1)
    loaded = io.load_checkpoint(tmp_path / "c")["per_rank"]
    random.setstate(loaded["python"])
    np.random.set_state(loaded["numpy"])
    torch.set_rng_state(loaded["torch"])
    assert drawn == (random.random(), np.random.rand(), torch.rand(1))
    assert torch.equal(io.load_rank(tmp_path / "c", 0)["torch"], state["torch"])


def test_a_checkpoint_takes_hardly_more_than_its_tensors(io, tmp_path):
    tensors = {f"layers.{i}.weight": torch.randn(256, 256) for i in range(64)}
    io.save_checkpoint({"state_dict": tensors, "epoch": 1}, tmp_path / "c")
    size = sum(file.stat().st_size for file in (tmp_path / "c").iterdir())
    assert size <= 1.01 * 64 * 256 * 256 * 4


def test_no_pickle_is_written(io, tmp_path):
    io.save_checkpoint({"weight": torch.randn(3), "values": (1, {2: "x"})}, tmp_path / "c")
    names = sorted(file.name for file in (tmp_path / "c").iterdir())
    assert names == ["manifest.json", "rank-00000.json", "rank-00000.safetensors", "state.json", "tensors.json"]
    for name in names:
        if name.endswith(".json"):
            json.loads((tmp_path / "c" / name).read_text())


def test_the_manifest_says_what_wrote_it(tmp_path):
    PortableCheckpointIO().save_checkpoint({"saved_with": "ddp"}, tmp_path / "c")
    manifest = json.loads((tmp_path / "c" / "manifest.json").read_text())["manifest"]
    assert (manifest["strategy"], manifest["world_size"], manifest["version"]) == ("ddp", 1, 1)
    assert manifest["torch"] == torch.__version__


def test_the_file_of_tensors_is_one_that_safetensors_readers_know(io, tmp_path):
    weight = torch.arange(6.0).reshape(2, 3)
    io.save_checkpoint({"state_dict": {"weight": weight, "half": weight.bfloat16()}}, tmp_path / "c")
    data = (tmp_path / "c" / "rank-00000.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert header["__metadata__"] == {"format": "pt"}
    assert header["state_dict/weight"] == {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
    assert header["state_dict/half"] == {"dtype": "BF16", "shape": [2, 3], "data_offsets": [24, 36]}
    assert len(data) == 8 + length + 36
    assert data[8 + length : 8 + length + 24] == weight.numpy().tobytes()


def test_nothing_is_ever_written_over(io, tmp_path, refusal):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    io.save_checkpoint({"epoch": 1}, tmp_path / "c")
    for name in ("c", "file", "link"):
        assert "exists already, and none is ever written over" in refusal(io.save_checkpoint, {}, tmp_path / name)
    assert io.load_checkpoint(tmp_path / "c")["epoch"] == 1
    assert (tmp_path / "file").read_text() == "mine"
    assert names(tmp_path) == ["c", "file", "last", "link"]


def test_last_points_to_the_newest(io, tmp_path, refusal):
    for epoch in range(3):
        io.save_checkpoint({"epoch": epoch}, tmp_path / f"epoch={epoch}")
    assert io.load_checkpoint(tmp_path / "last")["epoch"] == 2
    io.remove_checkpoint(tmp_path / "epoch=0")
    assert io.load_checkpoint(tmp_path / "last")["epoch"] == 2
    io.remove_checkpoint(tmp_path / "epoch=2")
    assert io.load_checkpoint(tmp_path / "last")["epoch"] == 1
    io.remove_checkpoint(tmp_path / "epoch=1")
    assert list(tmp_path.iterdir()) == []


def test_removing_what_is_not_there_is_no_error(io, tmp_path):
    io.remove_checkpoint(tmp_path / "c")


@pytest.mark.parametrize("name", ["..", "../secret", "/etc", "a/b", "", "a\0b"])
def test_a_pointer_leads_nowhere_else(io, tmp_path, refusal, name):
    (tmp_path / "last").write_text(name)
    assert "does not name a checkpoint beside it" in refusal(io.load_checkpoint, tmp_path / "last")


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (torch.eye(3).to_sparse(), "has the layout torch.sparse_coo"),
        (torch.empty(3, device="meta"), "is on the device meta"),
        (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), "NestedTensor"),
        (torch.nn.UninitializedParameter(), "UninitializedParameter"),
    ],
    ids=["sparse", "meta", "nested", "uninitialized"],
)
def test_tensors_that_have_no_plain_memory_are_refused(io, tmp_path, refusal, tensor, reason):
    message = refusal(io.save_checkpoint, {"state_dict": {"w": tensor}}, tmp_path / "c")
    assert "'state_dict/w'" in message
    assert reason in message
    assert list(tmp_path.iterdir()) == []


def test_a_template_is_filled_in_place(io, tmp_path):
    saved = {
        "state_dict": {"w": torch.randn(30, 20), "b": torch.randn(30)},
        "opt": [{0: {"m": torch.randn(3)}}],
        "e": 5,
    }
    saved |= {"big": {"t": torch.ones(3), "n": 1, "l": [1, torch.ones(3)], 2: torch.ones(1), 3: (torch.ones(1), 4)}}
    io.save_checkpoint(saved, tmp_path / "c")
    weight, moment = torch.zeros(20, 30).t(), torch.zeros(3)
    template = {"state_dict": {"w": weight}, "opt": [{0: {"m": moment, "hook": print}}], "big": None}
    loaded = io.load_into(tmp_path / "c", template)
    assert loaded["state_dict"]["w"] is weight
    assert loaded["opt"][0][0]["m"] is moment
    assert torch.equal(weight, saved["state_dict"]["w"])
    assert torch.equal(moment, saved["opt"][0][0]["m"])
    assert torch.equal(loaded["state_dict"]["b"], saved["state_dict"]["b"])
    assert loaded["big"] == {"n": 1, "l": [1], 3: (4,)}
    assert loaded["e"] == 5


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ({"w": torch.zeros(4)}, "'w' is float32 of shape (3,) in checkpoint"),
        ({"w": torch.zeros(3).half()}, "and float16 of shape (3,) here"),
        ({"v": torch.zeros(3), "u": torch.zeros(1)}, "has no tensor u, v"),
    ],
    ids=["shape", "dtype", "name"],
)
def test_a_template_that_does_not_fit_is_refused(io, tmp_path, refusal, template, reason):
    io.save_checkpoint({"w": torch.ones(3)}, tmp_path / "c")
    assert reason in refusal(io.load_into, tmp_path / "c", template)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda path: None, "does not exist"),
        (lambda path: path.mkdir(), "is a folder without manifest.json"),
        (lambda path: path.write_text(""), "is a file, and a folder was expected"),
    ],
    ids=["nothing", "empty folder", "file"],
)
def test_what_is_no_checkpoint_is_said_to_be_none(io, tmp_path, refusal, make, reason):
    make(tmp_path / "c")
    assert reason in refusal(io.load_checkpoint, tmp_path / "c")


def test_where_files_cannot_be_written_directly_the_cache_is_used(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "O_DIRECT", raising=False)  # as on macOS
    weight = random_tensor(torch.uint8, (17 * MIB + 5,))
    io = PortableCheckpointIO()
    io.save_checkpoint({"w": weight}, tmp_path / "c")
    assert torch.equal(io.load_checkpoint(tmp_path / "c")["w"], weight)


@pytest.mark.slow
def test_saving_a_large_model_takes_only_buckets_of_memory(tmp_path):
    """In a process of its own, where nothing else takes memory."""
    outcome = subprocess.run(
        [sys.executable, "-c", MEASURES_MEMORY, str(tmp_path / "c")],
        capture_output=True, text=True, timeout=400, check=True,
    )  # fmt: skip
    assert int(outcome.stdout) < 48 * MIB
