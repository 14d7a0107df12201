from __future__ import annotations

import pstats

import pytest

from dstrat import AdvancedProfiler, Trainer
from dstrat.errors import RequestError


def test_each_action_has_a_table_of_the_functions_that_it_calls(quiet_trainer, line, loader, capsys):
    quiet_trainer(profiler="advanced", max_epochs=1).fit(line, loader())
    text = capsys.readouterr().err
    assert text.startswith("Profile of fit on rank 0\n")
    before, step = text.split("\ntraining_step\n")
    assert "(training_step)" in step
    assert "(mse_loss)" in step
    assert "(training_step)" not in before


def test_the_calls_of_an_inner_action_count_for_it_alone(tmp_path):
    def inner():
        return sum(range(10))

    def outer():
        timed_inner()
        return max(range(10))

    profiler = AdvancedProfiler(tmp_path, "advanced", line_count_restriction=5, dump_stats=True)
    timed_inner, timed_outer = profiler.timed("inner/step", inner), profiler.timed("outer", outer)
    timed_outer()  # nothing is measured before the start
    profiler.start("fit", tmp_path / "unused", 1)
    timed_outer()
    timed_outer()
    profiler.finish()
    profiler.finish()
    names = ["fit-advanced-rank1.txt", "fit-inner_step-rank1.prof", "fit-outer-rank1.prof"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    calls = {
        action: {name: count for (_, _, name), (count, *_) in pstats.Stats(str(tmp_path / file)).stats.items()}
        for action, file in (("inner", names[1]), ("outer", names[2]))
    }
    assert calls["inner"]["inner"] == calls["inner"]["<built-in method builtins.sum>"] == 2
    assert calls["outer"]["<built-in method builtins.max>"] == 2
    assert "inner" not in calls["outer"]
    assert "outer" not in calls["inner"]


def test_an_exception_leaves_the_outer_action_measured(tmp_path, capsys):
    def fail():
        raise ValueError

    profiler = AdvancedProfiler()
    profiler.start("fit", tmp_path, 0)
    with profiler.profile("outer"):
        with pytest.raises(ValueError), profiler.profile("inner"):
            fail()
        max(1, 2)
    profiler.finish()
    outer = capsys.readouterr().err.split("outer\n")[1]
    assert "builtins.max" in outer


def test_a_restriction_to_nothing_is_refused():
    with pytest.raises(RequestError, match=r"AdvancedProfiler\(line_count_restriction=0\) must be an int"):
        AdvancedProfiler(line_count_restriction=0)
    with pytest.raises(RequestError, match=r"line_count_restriction=20\.0\) must be an int .* or a fraction"):
        AdvancedProfiler(line_count_restriction=20.0)
    with pytest.raises(RequestError, match=r"profiler='advance' is not 'simple', 'advanced', .* \(did you mean 'adv"):
        Trainer(accelerator="cpu", profiler="advance")
