"""Which rank's values of a module are in a checkpoint."""

from __future__ import annotations

import pytest
import torch

from dstrat import SingleDeviceStrategy, TorchCheckpointIO
from dstrat.checkpoint.portable.checkpoint_io import PortableCheckpointIO
from dstrat.checkpoint.strategy_state import load_rank_buffers, module_entries


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


@pytest.mark.parametrize("name", ["0.running_mean", "0._orig_mod.running_mean"])
def test_buffers_of_a_rank_may_have_the_names_of_compiled_layers(name):
    module = torch.nn.Sequential(torch.compile(torch.nn.BatchNorm1d(2), backend="eager"))
    strategy = SingleDeviceStrategy()
    strategy.connect(module)
    load_rank_buffers(strategy, {name: torch.tensor([1.0, 2.0])})
    assert module[0].running_mean.tolist() == [1, 2]
