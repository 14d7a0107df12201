"""Trainers of trl with strategies: what they log with their own DDP."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="this environment has no transformers: nox -s neighbours has")
pytest.importorskip("trl", reason="this environment has no trl: nox -s neighbours has")

sys.path.insert(0, str(Path(__file__).parent))

from test_trainer import result, run

pytestmark = [
    pytest.mark.xdist_group("hf_with_trl"),
    pytest.mark.filterwarnings("ignore"),  # of the libraries
]


@pytest.fixture(scope="module")
def own_ddp(tmp_path_factory):
    return result(run(tmp_path_factory.mktemp("own"), "own", {}, program="with_trl.py"))


@pytest.mark.parametrize("alias", ["fsdp", "mesh(cp=2)", pytest.param("mesh(tp=2)", marks=pytest.mark.variant)])
def test_fine_tuning_and_preferences_are_those_of_their_own_ddp(tmp_path, own_ddp, alias):
    seen = result(run(tmp_path, alias, {}, program="with_trl.py"))
    for name, expected in own_ddp.items():
        for step, entries in zip(seen[name], expected, strict=True):
            assert step.keys() == entries.keys()
            assert step["loss"] == pytest.approx(entries["loss"], rel=1e-6)
            for key, value in entries.items():  # entropy, accuracy of tokens, rewards, the norm of gradients ...
                assert step[key] == pytest.approx(value, rel=1e-4, abs=1e-6), (name, key)


def test_losses_of_trl_are_an_error_with_stages(tmp_path):
    with pytest.raises(AssertionError, match="SFTTrainer has its own compute_loss, and MeshStrategy computes losses"):
        run(tmp_path, "mesh(pp=2)", {}, program="with_trl.py")
