"""The copy that is taken while training stands still."""

from __future__ import annotations

import pytest
import torch

from dstrat.checkpoint.portable import checkpoint_io
from dstrat.checkpoint.portable.checkpoint_io import PortableCheckpointIO, StagingMemory
from dstrat.checkpoint.portable.payload import Payload
from dstrat.checkpoint.portable.save import arrange
from dstrat.parallel.shards import LocalBox


def shard(*sizes):
    tensors = [torch.arange(float(size)) for size in sizes]
    return arrange([Payload(f"{i}", LocalBox(tensor=tensor, starts=(0,))) for i, tensor in enumerate(tensors)]), tensors


@pytest.mark.parametrize("sizes", [[(3,), (5, 700)], [(5, 700), (3,)]], ids=["growing", "shrinking"])
def test_its_memory_serves_shards_of_any_size_and_stays_as_it_was_taken(sizes):
    memory = StagingMemory()
    for some in sizes:
        file, tensors = shard(*some)
        copied = memory.copy(file)
        for tensor in tensors:
            tensor.zero_()
        assert [payload.tensor.tolist() for payload in copied.payloads] == [list(map(float, range(n))) for n in some]


def test_chunks_hold_whole_payloads_and_those_that_are_larger(monkeypatch):
    monkeypatch.setattr(checkpoint_io, "_CHUNK", 40)
    memory = StagingMemory()
    file, _ = shard(5, 5, 30, 2)
    copied = memory.copy(file)
    assert [payload.tensor.tolist() for payload in copied.payloads] == [
        list(map(float, range(n))) for n in (5, 5, 30, 2)
    ]
    assert [chunk.numel() for chunk in memory._chunks] == [40, 120, 8]


class Stream:
    """Stands for a device whose last step changes the weights only when somebody waits for it."""

    def __init__(self, monkeypatch, weights):
        self.weights, self.num_waits = weights, 0
        monkeypatch.setattr(checkpoint_io, "wait_for_devices", self.wait)

    def wait(self, devices):
        assert devices == {self.weights.device}
        self.num_waits += 1
        if self.num_waits == 1:
            self.weights.fill_(2.0)


def test_a_save_has_the_weights_of_a_step_that_was_still_queued(monkeypatch, tmp_path):
    weights = torch.ones(3)
    Stream(monkeypatch, weights)
    PortableCheckpointIO().save_checkpoint({"w": weights}, tmp_path / "saved")
    assert PortableCheckpointIO().load_checkpoint(tmp_path / "saved")["w"].tolist() == [2.0] * 3


def test_staging_waits_before_it_reads_and_until_it_has_read(monkeypatch):
    weights = torch.ones(3)
    stream, io = Stream(monkeypatch, weights), PortableCheckpointIO()
    staged = io.stage({"w": weights})
    weights.zero_()
    assert staged.shard.payloads[0].tensor.tolist() == [2.0] * 3
    assert stream.num_waits == 2
