from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dstrat.training.callbacks.monitored import Ranking

scores = st.lists(st.one_of(st.floats(-1e6, 1e6), st.just(math.nan)), min_size=1, max_size=20)


@given(scores, st.integers(1, 5), st.sampled_from(["min", "max"]))
def test_the_best_k_are_kept_and_the_others_driven_out(values, limit, mode):
    ranking, driven_out = Ranking(limit, mode), []
    for index, value in enumerate(values):
        if ranking.accepts(value):
            driven_out += ranking.add(f"{index}.ckpt", value)
    numbers = sorted((value for value in values if not math.isnan(value)), reverse=mode == "max")
    kept = [value for value in ranking.scores.values() if not math.isnan(value)]
    assert sorted(kept, reverse=mode == "max") == numbers[:limit]
    assert len(ranking.scores) == min(limit, len(values))
    assert not set(driven_out) & set(ranking.scores)


def test_all_are_kept_with_minus_one_and_none_with_zero():
    everything, nothing = Ranking(-1, "min"), Ranking(0, "min")
    for score in (3.0, 1.0, math.nan, 2.0):
        assert everything.accepts(score)
        assert everything.add(f"{score}", score) == []
        assert not nothing.accepts(score)
    assert len(everything.scores) == 4


def test_of_equal_scores_the_first_stays():
    ranking = Ranking(1, "max")
    ranking.add("a", 1.0)
    assert not ranking.accepts(1.0)


def test_a_number_drives_out_nan_and_nan_drives_out_nothing():
    ranking = Ranking(1, "min")
    ranking.add("nan", math.nan)
    assert not ranking.accepts(math.nan)
    assert ranking.accepts(1e300)
    assert ranking.add("number", 1e300) == ["nan"]
    assert not ranking.accepts(math.nan)


def test_a_path_that_is_written_again_is_not_driven_out():
    ranking = Ranking(1, "min")
    ranking.add("best", 2.0)
    assert ranking.add("best", 1.0) == []
    assert ranking.scores == {"best": 1.0}


def test_a_smaller_limit_on_going_on_drives_out_several():
    ranking = Ranking(1, "min")
    ranking.restore({"a": 1.0, "b": 2.0, "c": 3.0})
    assert sorted(ranking.add("d", 0.5)) == ["a", "b", "c"]


@pytest.mark.parametrize(("mode", "best"), [("min", 1.0), ("max", 3.0)])
def test_better_means_what_the_mode_says(mode, best):
    ranking = Ranking(1, mode)
    assert ranking.is_better(best, than=2.0)
    assert not ranking.is_better(2.0, than=best)
    assert ranking.is_better(2.0, than=None)
    assert not ranking.is_better(math.nan, than=None)
