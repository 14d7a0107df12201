"""Checkpoints of Horovod, and the way to other strategies and back."""

from tests.moves import check_moves


def test_checkpoints_move_to_and_from_ddp_and_simulated_devices(tmp_path):
    check_moves("horovod", str(tmp_path))
