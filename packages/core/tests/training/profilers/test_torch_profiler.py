from __future__ import annotations

import json
import logging
import pickle

import pytest
import torch

from dstrat.errors import RequestError
from dstrat.training.profilers.torch_profiler import TorchProfiler


def run(profiler, folder, *, batches=6, rank=0, stage="fit"):
    layer = torch.nn.Linear(4, 4)
    profiler.start(stage, folder, rank)
    step = profiler.timed("Strategy.training_step", lambda: layer(torch.zeros(2, 4)).sum().backward())
    for _ in range(batches):
        step()
        profiler.step()
    profiler.finish()


def test_a_trace_holds_the_batches_that_were_asked_for_and_rank_0_prints_the_operators(tmp_path, capsys):
    run(TorchProfiler(wait=1, warmup=1, active=3, record_shapes=True), tmp_path / "logs")
    (trace,) = (tmp_path / "logs").iterdir()
    assert trace.name == "fit-rank0-batch5.pt.trace.json"
    events = json.loads(trace.read_text())["traceEvents"]
    assert any("Input Dims" in event.get("args", {}) for event in events)
    names = [event["name"] for event in events]
    assert names.count("Strategy.training_step") == 3
    printed = capsys.readouterr().err
    assert "aten::addmm" in printed
    assert printed.splitlines()[-1] == f"trace: {trace}"


def test_each_rank_writes_its_trace_and_only_rank_0_prints(tmp_path, capsys):
    run(TorchProfiler(wait=0, warmup=1, active=1, dirpath=tmp_path), tmp_path / "logs", rank=3, stage="test")
    assert [path.name for path in tmp_path.iterdir()] == ["test-rank3-batch2.pt.trace.json"]
    assert capsys.readouterr().err == ""


def test_cycles_have_a_trace_each_and_the_end_of_the_run_ends_the_last(tmp_path, capsys):
    run(TorchProfiler(wait=1, warmup=1, active=2, repeat=0, row_limit=0), tmp_path, batches=7)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["fit-rank0-batch4.pt.trace.json", "fit-rank0-batch7.pt.trace.json"]
    assert [line.split(":")[0] for line in capsys.readouterr().err.splitlines()] == ["trace", "trace"]


def test_each_stage_counts_its_own_batches(tmp_path, capsys):
    profiler = TorchProfiler(wait=0, active=1, row_limit=0)
    for stage in ("fit", "test"):
        run(profiler, tmp_path, stage=stage)
        printed = capsys.readouterr().err.splitlines()
        assert printed == [f"trace: {tmp_path / f'{stage}-rank0-batch2.pt.trace.json'}"]


def test_a_run_that_was_too_short_to_record_is_told_of(tmp_path, caplog, capsys):
    with caplog.at_level(logging.WARNING):
        run(TorchProfiler(), tmp_path, batches=3)
    assert "it starts with batch 4, and fit had 3 batches" in caplog.text
    assert list(tmp_path.iterdir()) == []
    assert "trace:" not in capsys.readouterr().err
    pickle.dumps(TorchProfiler())


@pytest.mark.parametrize("wrong", [{"active": 0}, {"wait": -1}, {"repeat": -2}])
def test_numbers_of_batches_that_make_no_sense_are_an_error(wrong):
    with pytest.raises(RequestError, match="active must be 1 or more, the others 0 or more"):
        TorchProfiler(**wrong)


def test_tables_go_to_a_file_sorted_and_grouped_as_asked(tmp_path, capsys):
    profiler = TorchProfiler(
        tmp_path, "times", True, wait=0, active=2, export_to_chrome=False, sort_by_key="count",
        table_kwargs={"header": "the operators"},
    )  # fmt: skip
    run(profiler, tmp_path / "unused", rank=0)
    assert [path.name for path in tmp_path.iterdir()] == ["fit-times-rank0.txt"]
    text = (tmp_path / "fit-times-rank0.txt").read_text()
    assert "the operators" in text
    header = next(line for line in text.splitlines() if "# of Calls" in line)
    assert "Input Shapes" in header
    at = header.index("# of Calls")
    counts = [int(line[at:].split()[0]) for line in text.splitlines() if line.lstrip().startswith("aten::")]
    assert counts == sorted(counts, reverse=True)
    assert capsys.readouterr().err == f"profile: {tmp_path / 'fit-times-rank0.txt'}\n"


def test_a_function_of_the_user_takes_what_was_recorded(tmp_path, capsys):
    taken = []
    run(TorchProfiler(wait=0, active=2, row_limit=0, on_trace_ready=taken.append), tmp_path)
    assert [type(profile).__name__ for profile in taken] == ["profile"]
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"emit_nvtx": True}, "no option 'emit_nvtx', only activities, "),
        ({"schedule": None}, "no option 'schedule': wait, warmup, active and repeat are its schedule"),
        ({"sort_by_key": "time"}, r"\(sort_by_key='time'\) is no column of torch's table: choose one such as"),
    ],
)
def test_what_torch_does_not_have_is_an_error_at_once(wrong, said):
    with pytest.raises(RequestError, match=said):
        TorchProfiler(**wrong)
