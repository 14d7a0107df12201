"""Random programs: equal after a resume, and on two ranks; tests/neighbours compares them with Lightning.

``python -m tests.differential lightning 0 2000`` compares more of them, in the environment of ``nox -s neighbours``;
instead of ``lightning`` also ``lightning_ddp`` on two ranks, ``resumes``, ``divisions``, ``ddp``, ``fsdp`` and
``deepspeed_stage_1``, ``_2`` and ``_3``.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.differential.comparisons import compare
from tests.differential.divisions import missing_library, random_division
from tests.differential.documented import ROWS

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch and Lightning, about the smallest programs


@pytest.mark.parametrize("first", range(0, 20, 10))
def test_a_resume_after_a_random_batch_changes_nothing(tmp_path, first):
    found = {seed: compare("resumes", seed, tmp_path / str(seed)) for seed in range(first, first + 10)}
    assert {seed: texts for seed, texts in found.items() if texts} == {}


@pytest.mark.parametrize("seed", range(12))
def test_a_random_division_of_the_data_has_the_right_gradient(tmp_path, seed):
    if library := missing_library(random_division(seed)["alias"]):
        pytest.skip(f"needs {library}: nox -s complete")
    assert compare("divisions", seed, tmp_path) == []


def test_each_difference_that_is_left_out_is_documented():
    docs = Path(__file__).parents[2] / "docs"
    text = "\n".join((docs / name).read_text() for name in ("coming-from-lightning.md", "hooks.md"))
    assert [row for row in ROWS if row not in text] == []


@pytest.mark.parametrize(
    ("alias", "seed"), [("ddp", 0), ("fsdp", 1), *([("deepspeed_stage_2", 2)] if find_spec("deepspeed") else [])]
)
def test_two_ranks_compute_what_one_device_does(tmp_path, alias, seed):
    assert compare(alias, seed, tmp_path) == []
