"""Pipelines in a Trainer: losses, validation, predictions, checkpoints that move between layouts, and resume."""

import pytest
from packages.mesh.tests.pipeline_fits import fit
from tests.ranks import in_ranks

from dstrat_mesh import MeshStrategy


def trained(cluster, path=None, ckpt=None, max_steps=6, accumulate=1, **options):
    shares = cluster.world_size // options.get("pp", 1)
    arguments = {"plugins": [cluster], "gradient_clip_val": 0.5}
    module, _ = fit(
        MeshStrategy(**options), cluster.world_size, 8 // shares, path, ckpt, max_steps, accumulate, **arguments
    )
    return module.losses, module.validated


def one_device(path=None, ckpt=None, max_steps=6, accumulate=1):
    module, _ = fit("single_device", 1, 8, path, ckpt, max_steps, accumulate, gradient_clip_val=0.5)
    return module.losses, module.validated


def test_a_trainer_has_the_losses_of_one_device_and_checkpoints_move(tmp_path):
    losses, validated = one_device(max_steps=12)
    saved = str(tmp_path / "two")
    for found in in_ranks(trained, 2, pp=2, path=saved):
        assert found[0] == pytest.approx(losses[:6], rel=1e-6)
    for options in ({"pp": 2, "dp_shard": 2}, {"pp": 4}, {"dp_shard": 4}):
        for found in in_ranks(trained, 4, ckpt=saved, max_steps=12, **options):
            assert found[0] == pytest.approx(losses[6:], rel=1e-6)
    assert one_device(ckpt=saved, max_steps=12)[0] == pytest.approx(losses[6:], rel=1e-6)
    one = str(tmp_path / "one")
    one_device(path=one)
    for found in in_ranks(trained, 2, ckpt=one, max_steps=12, pp=2):
        assert found[0] == pytest.approx(losses[6:], rel=1e-6)
        assert found[1][-1] == pytest.approx(validated[-1], rel=1e-6)


def test_accumulated_batches_are_those_of_one_device_and_resume_is_exact(tmp_path):
    saved = str(tmp_path / "saved")
    losses, _ = one_device(max_steps=4, accumulate=2)
    for found in in_ranks(trained, 2, pp=2, max_steps=4, accumulate=2):
        assert found[0] == pytest.approx(losses, rel=1e-6)
    through = in_ranks(trained, 2, pp=2, max_steps=6, path=saved + "6")
    in_ranks(trained, 2, pp=2, max_steps=3, path=saved)  # in the middle of an epoch
    resumed = in_ranks(trained, 2, pp=2, max_steps=6, ckpt=saved)
    assert [of_rank[0] for of_rank in resumed] == [of_rank[0][3:] for of_rank in through]
