from __future__ import annotations

import pickle

import pytest

from dstrat.errors import RequestError
from dstrat.training.profilers.defaults import make_profiler
from dstrat.training.profilers.profiler import Profiler
from dstrat.training.profilers.simple import SimpleProfiler
from dstrat.training.profilers.torch_profiler import TorchProfiler


@pytest.fixture
def clock(monkeypatch):
    """A clock that moves when it is told to."""

    class Clock:
        now = 100.0

        def pass_(self, seconds):
            self.now += seconds

    clock = Clock()
    monkeypatch.setattr("dstrat.training.profilers.simple.perf_counter", lambda: clock.now)
    return clock


def cells(line):
    return line.replace("everything else", "else").split()


def test_actions_are_listed_with_calls_and_time_and_what_they_took_without_those_inside(tmp_path, capsys, clock):
    profiler = SimpleProfiler()
    profiler.start("fit", tmp_path, 0)
    profiler.timed("never", clock.pass_)
    inner = profiler.timed("inner", clock.pass_)

    def outer_():
        clock.pass_(1.0)
        inner(0.25)
        inner(0.75)
        return "result"

    outer = profiler.timed("outer", outer_)
    assert [outer(), outer()] == ["result", "result"]
    with profiler.profile("mine"):
        inner(1.0)
    clock.pass_(5.0)
    profiler.finish()
    captured = capsys.readouterr()
    title, header, rule, *lines = captured.err.splitlines()
    assert title == "Profile of fit on rank 0: 10.000 s"
    assert header.split() == ["action", "calls", "mean", "ms", "total", "s", "own", "%"]
    assert set(rule) == {"-"}
    assert [cells(line) for line in lines] == [
        ["outer", "2", "2000.000", "4.000", "20.0"],
        ["inner", "5", "600.000", "3.000", "30.0"],
        ["mine", "1", "1000.000", "1.000", "0.0"],
        ["(else)", "5.000", "50.0"],
    ]
    assert captured.out == ""


def test_a_table_that_is_not_extended_has_the_times_alone(tmp_path, capsys, clock):
    profiler = SimpleProfiler(extended=False)
    profiler.start("fit", tmp_path, 0)
    profiler.timed("step", clock.pass_)(1.0)
    profiler.finish()
    _, header, _, *lines = capsys.readouterr().err.splitlines()
    assert header.split() == ["action", "mean", "ms", "total", "s"]
    assert [cells(line) for line in lines] == [["step", "1000.000", "1.000"], ["(else)", "0.000"]]


def test_an_action_that_fails_counts_too(tmp_path, capsys, clock):
    def fail():
        clock.pass_(1.0)
        raise StopIteration

    profiler = SimpleProfiler()
    profiler.start("fit", tmp_path, 0)
    failing, working = profiler.timed("next_batch", fail), profiler.timed("step", lambda: clock.pass_(1.0))
    with pytest.raises(StopIteration):
        failing()
    with pytest.raises(ValueError, match="mine"), profiler.profile("mine"):
        raise ValueError("mine")
    working()
    profiler.finish()
    names = [line.split()[0] for line in capsys.readouterr().err.splitlines()[3:]]
    assert names == ["next_batch", "step", "mine", "(everything"]


def test_each_stage_starts_from_nothing_and_ends_once(tmp_path, capsys, clock):
    profiler = SimpleProfiler()
    step = profiler.timed("step", lambda: clock.pass_(1.0))
    for stage in ("fit", "test"):
        profiler.start(stage, tmp_path, 0)
        step()
        profiler.finish()
        profiler.finish()
        lines = capsys.readouterr().err.splitlines()
        assert lines[0] == f"Profile of {stage} on rank 0: 1.000 s"
        assert cells(lines[3]) == ["step", "1", "1000.000", "1.000", "100.0"]
        assert len(lines) == 5
    pickle.dumps(SimpleProfiler())


def test_every_rank_writes_its_file_and_rank_0_alone_prints(tmp_path, capsys, clock):
    for rank in range(2):
        profiler = SimpleProfiler(filename="profile")
        profiler.start("validate", tmp_path / "logs", rank)
        clock.pass_(2.0)
        profiler.finish()
        written = (tmp_path / "logs" / f"validate-profile-rank{rank}.txt").read_text()
        assert written.startswith(f"Profile of validate on rank {rank}: 2.000 s\n")
        assert (capsys.readouterr().err == written) == (rank == 0)
    quiet = SimpleProfiler(tmp_path, "mine", prints=False)
    quiet.start("fit", tmp_path / "elsewhere", 0)
    clock.pass_(1.0)
    quiet.finish()
    assert (tmp_path / "fit-mine-rank0.txt").exists()
    assert capsys.readouterr().err == ""


def test_a_trainer_takes_a_profiler_by_name_or_as_an_instance():
    assert make_profiler(None) is None
    assert isinstance(make_profiler("simple"), SimpleProfiler)
    assert isinstance(make_profiler("torch"), TorchProfiler)
    assert isinstance(make_profiler("pytorch"), TorchProfiler)
    mine = SimpleProfiler()
    assert make_profiler(mine) is mine


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("torched", r"profiler='torched' is not 'simple', 'advanced', 'torch', .* None \(did you mean 'torch'\?\)$"),
        ("xla", r"profiler='xla' is not .*, a Profiler \(an instance, not a class\) or None$"),
        (SimpleProfiler, r"profiler=<class .*SimpleProfiler'> is not"),
        (True, "profiler=True is not"),
    ],
)
def test_anything_else_is_an_error_that_says_what_there_is(given, said):
    with pytest.raises(RequestError, match=said):
        make_profiler(given)


def test_a_profiler_of_ones_own_needs_one_method(tmp_path):
    class Listing(Profiler):
        def __init__(self):
            self.names = []

        def profile(self, name):
            import contextlib

            self.names.append(name)
            return contextlib.nullcontext()

    profiler = Listing()
    profiler.start("fit", tmp_path, 0)
    assert profiler.timed("add", lambda a, b: a + b)(1, b=2) == 3
    profiler.step()
    profiler.finish()
    assert profiler.names == ["add"]
