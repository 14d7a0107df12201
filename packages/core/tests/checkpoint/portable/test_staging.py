"""The copy that is taken while training stands still."""

from __future__ import annotations

import pytest
import torch

from dstrat.checkpoint.portable.checkpoint_io import StagingMemory
from dstrat.checkpoint.portable.save import arrange
from dstrat.checkpoint.portable.shards import LocalBox, Payload


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
