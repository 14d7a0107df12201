"""Pipelines in a Trainer: predictions, and mixed precision.

Losses, resume and moves of each layout are in test_layout_conformance.py.
"""

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
