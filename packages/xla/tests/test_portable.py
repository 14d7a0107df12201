"""Portable checkpoints of tensors on XLA devices."""

import torch
from torch import nn

from dstrat.checkpoint.portable.checkpoint_io import PortableCheckpointIO


def test_tensors_of_one_shape_are_not_taken_for_tied_ones(tmp_path):
    one, other = torch.full((3,), 1.0, device="xla"), torch.full((3,), 2.0, device="xla")
    io = PortableCheckpointIO()
    io.save_checkpoint({"state_dict": {"one": one, "other": other}}, tmp_path / "checkpoint")
    loaded = io.load_checkpoint(tmp_path / "checkpoint")["state_dict"]
    assert loaded["one"].tolist() == [1.0] * 3
    assert loaded["other"].tolist() == [2.0] * 3


def test_tied_weights_are_stored_once(tmp_path):
    first, second = nn.Linear(64, 64, bias=False).to("xla"), nn.Linear(64, 64, bias=False).to("xla")
    second.weight = first.weight
    state = nn.Sequential(first, second).state_dict()
    PortableCheckpointIO().save_checkpoint({"state_dict": dict(state)}, tmp_path / "checkpoint")
    stored = sum(file.stat().st_size for file in (tmp_path / "checkpoint").glob("*.safetensors"))
    assert stored < 2 * 64 * 64 * 4
