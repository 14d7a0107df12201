"""Colossal-AI's booster with DistributedDataParallel: the losses of one device, and checkpoints that move."""

import pytest
from tests.hand_loop import BlockNet, losses_of, parts
from tests.moves import check_moves
from tests.ranks import each, in_ranks
from tests.ways_of_training import WAYS, losses_of_one_device

pytest.importorskip("colossalai", reason="needs colossalai")

from dstrat_colossalai import ColossalAITorchDDPStrategy


def losses(cluster, training):
    return losses_of(ColossalAITorchDDPStrategy(), BlockNet(), parts(cluster), **training)


@pytest.mark.parametrize("world_size", [1, 2])
def test_losses_are_those_of_one_device(world_size):
    cases = {way: {"training": training} for way, training in WAYS.items()}
    expected = losses_of_one_device(BlockNet)
    for found in in_ranks(each, world_size, function=losses, cases=cases):
        assert found == expected


def test_checkpoints_move_to_and_from_ddp_and_simulated_devices(tmp_path):
    check_moves("colossalai_torch_ddp", str(tmp_path))
