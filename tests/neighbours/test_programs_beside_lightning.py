"""Random programs do the same under Lightning and dstrat."""

from __future__ import annotations

import pytest
from tests.differential.comparisons import compare
from tests.differential.differences import close
from tests.differential.running import train

pytest.importorskip("lightning.pytorch", reason="this environment has no Lightning: nox -s neighbours has")

pytestmark = [pytest.mark.neighbours, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("first", range(0, 40, 20))
def test_programs_do_what_they_do_under_lightning(tmp_path, first):
    found = {seed: compare("lightning", seed, tmp_path / str(seed)) for seed in range(first, first + 20)}
    assert {seed: texts for seed, texts in found.items() if texts} == {}


@pytest.mark.parametrize("start", [1, 3, 0.1, 0.5, 0.8, 1.0])
@pytest.mark.parametrize(("epochs", "strategy"), [(2, "cos"), (0, "linear"), (10, "linear")])
def test_averaging_trains_with_the_rates_of_lightning(tmp_path, start, epochs, strategy):
    swa = {"swa_lrs": 0.01, "swa_epoch_start": start, "annealing_epochs": epochs, "annealing_strategy": strategy}
    spec = {"bs": 4, "n": 8, "scheduler": "exp", "swa": swa, "trainer": {"max_epochs": 5}}
    theirs, ours = (train(library, spec, tmp_path / library) for library in ("lightning", "dstrat"))
    assert close(theirs["lrs"], ours["lrs"], 1e-12)
    assert close(theirs["losses"], ours["losses"], 1e-6)
