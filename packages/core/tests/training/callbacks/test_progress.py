from __future__ import annotations

import math

import pytest

from dstrat.training.callbacks.progress import (
    Progress,
    format_count,
    format_duration,
    format_remaining,
    format_speed,
    format_value,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (3, "3"), (3.0, "3"), (-2.0, "-2"), (0.0, "0"), (100000.0, "100000"), (1e12, "1e+12"),
        (0.123456, "0.1235"), (12.3456, "12.35"), (1234.56, "1235"), (123456.7, "123457"), (0.00012, "0.00012"),
        (1.25e-7, "1.25e-07"), (math.nan, "nan"), (math.inf, "inf"), (-math.inf, "-inf"),
    ],
)  # fmt: skip
def test_numbers_have_four_significant_digits_and_whole_ones_no_point(value, text):
    assert format_value(value) == text


@pytest.mark.parametrize(
    ("speed", "text"), [(None, ""), (52.13, "52.1 it/s"), (1.0, "1 it/s"), (0.5, "2 s/it"), (1234.5, "1234 it/s")]
)
def test_slow_loops_are_given_in_seconds_per_batch(speed, text):
    assert format_speed(speed) == text


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00"), (65, "1:05"), (3599.9, "1:00:00")])
def test_durations_are_minutes_and_seconds_and_hours_where_there_are(seconds, text):
    assert format_duration(seconds) == text


def test_a_loop_without_a_length_shows_what_is_done_and_no_end():
    progress = Progress("Test", None)
    progress.reach(3)
    assert format_count(progress) == "3"
    assert progress.seconds_remaining is None
    assert format_remaining(progress) == ""


def test_speed_and_time_left_follow_the_batches_lately(monkeypatch):
    now = 100.0
    monkeypatch.setattr("dstrat.training.callbacks.progress.monotonic", lambda: now)
    progress = Progress("Epoch 1", 1000)
    assert progress.speed is None
    for second in range(1, 101):
        now = 100.0 + second
        progress.reach(second if second <= 50 else 50 + 10 * (second - 50))
    assert progress.speed == pytest.approx(10.0)
    assert progress.seconds_remaining == pytest.approx(45.0)
    progress.skip(3600.0)
    now += 3600.0
    progress.reach(550)
    assert progress.speed == pytest.approx(10.0, rel=0.1)
