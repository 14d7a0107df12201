"""Which rank's values of a module are in a checkpoint."""

from __future__ import annotations

import pytest
import torch

from dstrat import SingleDeviceStrategy, TorchCheckpointIO
from dstrat.checkpoint.portable.checkpoint_io import PortableCheckpointIO
from dstrat.checkpoint.strategy_state import module_entries


class OtherRank(SingleDeviceStrategy):
    is_global_zero = False


@pytest.mark.parametrize("io", [TorchCheckpointIO, PortableCheckpointIO])
def test_buffers_which_may_differ_are_those_of_rank_0(io):
    names = []
    for cls in (SingleDeviceStrategy, OtherRank):
        strategy = cls(checkpoint_io=io())
        strategy.connect(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)))
        names.append(module_entries(strategy)["state_dict"].keys())
    weights = {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert names == [weights | {"1.running_mean", "1.running_var", "1.num_batches_tracked"}, weights]
