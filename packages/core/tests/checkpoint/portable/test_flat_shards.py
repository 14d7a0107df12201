"""Runs of elements of flattened tensors, as each process holds them, in checkpoints."""

import os

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.accelerators import process_group

from dstrat.builtin.clusters.local import LocalEnvironment
from dstrat.checkpoint.portable.checkpoint_io import PortableCheckpointIO
from dstrat.errors import CheckpointError
from dstrat.interfaces.checkpoint_io import FlatShard, OptionalTensors
from dstrat.launch.local import LocalLauncher
from dstrat.parallel.shards import local_boxes

SHAPES = {"matrix": (5, 7), "cube": (3, 4, 5), "vector": (11,), "scalar": (), "thin": (1, 6, 1)}


def run_in_ranks(function, *args, ranks):
    def run():
        with process_group(LocalEnvironment(os.environ)):
            found = function(*args)
            dist.all_reduce(torch.zeros(1))  # a rank that ends early would be lost by one that connects late
            return found

    return LocalLauncher(num_processes=ranks, start_method="fork").launch(run)


def whole(name):
    shape = SHAPES[name]
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


def shard(tensor, rank, num_ranks):
    """The share of a rank of all elements; those of an uneven number are uneven."""
    size = -(-tensor.numel() // num_ranks)
    start = min(rank * size, tensor.numel())
    return FlatShard(local=tensor.reshape(-1)[start : start + size].clone(), start=start, shape=tuple(tensor.shape))


@settings(max_examples=200)
@given(shape=st.lists(st.integers(1, 5), max_size=4), data=st.data())
def test_its_boxes_are_its_elements(shape, data):
    numel = torch.Size(shape).numel()
    start = data.draw(st.integers(0, numel))
    end = data.draw(st.integers(start, numel))
    tensor = torch.arange(numel).reshape(shape)
    found = FlatShard(local=tensor.reshape(-1)[start:end], start=start, shape=tuple(shape))
    parts = local_boxes(found)
    assert len(parts) <= max(1, 2 * len(shape) - 1)
    for part in parts:
        box = tuple(slice(first, first + size) for first, size in zip(part.starts, part.tensor.shape, strict=True))
        assert torch.equal(tensor[box], part.tensor)
    assert sum(part.tensor.numel() for part in parts) == end - start


def save(path, tied=False):
    rank, size = dist.get_rank(), dist.get_world_size()
    tensors = {name: shard(whole(name), rank, size) for name in SHAPES}
    if tied:
        tensors["again"] = tensors["scalar"]  # of which only rank 0 has something
    PortableCheckpointIO().save_checkpoint({"state_dict": tensors}, path)


def load(path):
    rank, size = dist.get_rank(), dist.get_world_size()
    template = {name: shard(torch.zeros(shape), rank, size) for name, shape in SHAPES.items()}
    loaded = PortableCheckpointIO().load_into(path, {"state_dict": template})["state_dict"]
    for name in SHAPES:
        assert loaded[name] is template[name]
        assert torch.equal(loaded[name].local, shard(whole(name), rank, size).local)


@pytest.mark.parametrize(("saving", "loading"), [(2, 3), (4, 2), (3, 4)])
def test_they_move_between_numbers_of_ranks(tmp_path, saving, loading):
    run_in_ranks(save, tmp_path / "c", ranks=saving)
    run_in_ranks(load, tmp_path / "c", ranks=loading)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_they_come_back_whole(io, tmp_path, ranks):
    run_in_ranks(save, tmp_path / "c", True, ranks=ranks)
    loaded = io.load_checkpoint(tmp_path / "c")["state_dict"]
    for name in SHAPES:
        assert torch.equal(loaded[name], whole(name))
    assert loaded["again"] is loaded["scalar"]


@pytest.mark.parametrize("elements", [0, 4])
def test_shards_that_leave_out_elements_are_not_saved(tmp_path, elements):
    shard = FlatShard(local=torch.zeros(elements), start=0, shape=(2, 3))
    with pytest.raises(CheckpointError, match="the pieces of tensor 'weight' do not cover it exactly once"):
        PortableCheckpointIO().save_checkpoint({"weight": shard}, tmp_path / "saved")
    assert list(tmp_path.iterdir()) == []


def test_what_is_optional_may_be_missing_or_of_another_dtype(io, tmp_path, refusal):
    io.save_checkpoint({"optimizer": {"exp_avg": torch.arange(6.0).reshape(2, 3).bfloat16()}}, tmp_path / "c")
    wanted = {"exp_avg": FlatShard(local=torch.zeros(3), start=2, shape=(2, 3)), "step": torch.zeros(())}
    loaded = io.load_into(tmp_path / "c", {"optimizer": OptionalTensors(wanted)})["optimizer"]
    assert list(loaded) == ["exp_avg"]
    assert loaded["exp_avg"].local.tolist() == [2.0, 3.0, 4.0]
    assert "has no tensor optimizer/step" in refusal(io.load_into, tmp_path / "c", {"optimizer": wanted})
    wanted = {"exp_avg": FlatShard(local=torch.zeros(3), start=0, shape=(3, 2))}
    assert "of shape (3, 2) here" in refusal(io.load_into, tmp_path / "c", {"optimizer": OptionalTensors(wanted)})
