"""Random programs do the same under Lightning and dstrat."""

from __future__ import annotations

import pytest
from tests.differential.comparisons import compare

pytest.importorskip("lightning.pytorch", reason="this environment has no Lightning: nox -s neighbours has")

pytestmark = [pytest.mark.neighbours, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("first", range(0, 40, 20))
def test_programs_do_what_they_do_under_lightning(tmp_path, first):
    found = {seed: compare("lightning", seed, tmp_path / str(seed)) for seed in range(first, first + 20)}
    assert {seed: texts for seed, texts in found.items() if texts} == {}
