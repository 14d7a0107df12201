"""Pipelines in a Trainer: losses, validation, predictions, checkpoints that move between layouts, and resume."""

import pytest
import torch
from packages.mesh.tests.pipeline_fits import fit, predictions
from tests.ranks import in_ranks

from dstrat_mesh import MeshStrategy


def trained(cluster, path=None, ckpt=None, max_steps=6, accumulate=1, precision="32-true", **options):
    shares = cluster.world_size // options.get("pp", 1)
    arguments = {"plugins": [cluster], "gradient_clip_val": 0.5, "precision": precision}
    module, _ = fit(
        MeshStrategy(**options), cluster.world_size, 8 // shares, path, ckpt, max_steps, accumulate, **arguments
    )
    return module.losses, module.validated


def one_device(path=None, ckpt=None, max_steps=6, accumulate=1, **options):
    module, _ = fit("single_device", 1, 8, path, ckpt, max_steps, accumulate, gradient_clip_val=0.5, **options)
    return module.losses, module.validated


@pytest.mark.slow
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


def predicted(cluster):
    return predictions(MeshStrategy(pp=2), cluster.world_size, 4, plugins=[cluster])


def test_predictions_are_those_of_one_device():
    expected = predictions("single_device", 1, 4)
    for found in in_ranks(predicted):
        torch.testing.assert_close(found, expected)


def test_mixed_precision_trains_in_stages():
    losses, validated = one_device(precision="bf16-mixed")
    for found in in_ranks(trained, 2, pp=2, precision="bf16-mixed"):
        assert found[0] == pytest.approx(losses, rel=0.02)  # parameters are gathered in bfloat16, of 8 bits
        assert found[1][-1] == pytest.approx(validated[-1], rel=0.02)
        assert found[0] != pytest.approx(losses_in_float32(), rel=1e-5)


def losses_in_float32():
    return one_device()[0]
