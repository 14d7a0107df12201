"""Lists, plots and reports of recorded runs, which are written here as a run writes them."""

import csv
import json
import re
import subprocess
import sys
import time
from html.parser import HTMLParser

import pytest
from click.testing import CliRunner

from dstrat.cli.main import commands
from dstrat.cli.runs.command import describe_seconds
from dstrat.cli.runs.record import StageRun, read_run
from dstrat.cli.runs.report import _charts, _throughput
from dstrat.errors import DstratError
from dstrat.launch.run_record import RECORD_FILE, this_process

PLAN = {
    "choices": [{"subject": "strategy", "value": "ddp", "reason": "asked for", "owner": "dstrat-ddp 0.1.0"}],
    "strategy_alias": "ddp",
    "world_size": 2,
    "accelerator": "cpu",
    "num_devices": 2,
    "num_nodes": 1,
    "precision": "32-true",
}
NOW = time.time()
GONE = {**this_process(), "start": 1}


def begin(attempt=1, at=0, process=GONE, **values):
    return {
        "event": "begin",
        "time": NOW + at,
        "stage": "fit",
        "attempt": attempt,
        "process": process,
        "module": "Net",
        "plan": PLAN,
        "arguments": {"max_epochs": 3, "callbacks": "<b>"},
        "monitor": {"name": "val_loss", "mode": "min"},
        "metrics": "metrics.csv",
        "command": ["train.py", "--name", "a b"],
        "environment": {"torch": "2.13", "dstrat": "0.1.0", "variables": {"OMP_NUM_THREADS": "1"}, "runtime": None},
        **values,
    }


def epoch(step, at):
    return {"event": "epoch", "time": NOW + at, "epoch": step // 10, "step": step}


def checkpoint(step, at):
    return {"event": "checkpoint", "time": NOW + at, "path": f"checkpoints/{step}", "step": step, "seconds": 0.1}


def end(step, at, status="completed", **values):
    sizes = {"device": 0, "host": 3 * 2**30, "host_before": 2**30}
    return {"event": "end", "time": NOW + at, "status": status, "step": step, "memory": [sizes, sizes], **values}


def failure(at):
    summary = "rank 1 of 2 was killed by SIGKILL"
    return {"event": "failure", "time": NOW + at, "rank": 1, "summary": summary, "traceback": ""}


def write(folder, events, values=()):
    """Write a run with values of val_loss."""
    folder.mkdir(parents=True)
    (folder / RECORD_FILE).write_text("".join(json.dumps(event) + "\n" for event in events))
    with (folder / "metrics.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerows([["step", "val_loss"], *([10 * (n + 1), value] for n, value in enumerate(values))])


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working directory, with four runs."""
    logs = tmp_path / "dstrat_logs"
    write(logs / "version_0", [begin(), epoch(0, 1), epoch(10, 3), end(20, 5)], [0.5, 0.2])
    write(logs / "version_1", [begin(at=10), failure(15), begin(2, 20), epoch(10, 21), end(30, 25)], [0.9, 0.4, 0.1])
    write(logs / "version_2", [begin(at=30), epoch(0, 31), checkpoint(10, 34)], [0.8])
    write(logs / "version_3", [begin(at=40), end(5, 45, "failed", error="ValueError: boom", traceback="at <line>")])
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def dstrat(folder):
    return lambda *arguments: (
        CliRunner(env={"COLUMNS": "80"}).invoke(commands, arguments, catch_exceptions=False).output
    )


def rows(printed):
    return [re.split(r"  +", line.strip()) for line in printed.splitlines()]


def test_runs_are_listed_with_their_ends_and_values(dstrat):
    headers, *listed, reason = rows(dstrat("runs"))
    assert headers == ["run", "status", "strategy", "steps", "time", "begin", "val_loss"]
    assert [row[:5] + row[6:] for row in listed] == [
        ["dstrat_logs/version_0", "completed", "ddp x2", "20", "5.0 s", "0.2"],
        ["dstrat_logs/version_1", "completed", "ddp x2", "30", "10.0 s", "0.1"],
        ["dstrat_logs/version_2", "killed", "ddp x2", "10", "4.0 s", "0.8"],
        ["dstrat_logs/version_3", "failed", "ddp x2", "5", "5.0 s"],
    ]
    assert reason == ["dstrat_logs/version_3 failed: ValueError: boom"]


def test_runs_are_sorted_by_a_value_and_those_without_it_come_last(dstrat):
    names = [row[0][-1] for row in rows(dstrat("runs", "--sort", "val_loss"))[1:5]]
    assert names == ["1", "0", "2", "3"]
    names = [row[0][-1] for row in rows(dstrat("runs", "--sort", "val_loss", "--higher"))[1:5]]
    assert names == ["2", "0", "1", "3"]


def test_runs_as_json_have_everything(dstrat):
    listed = json.loads(dstrat("runs", "--json"))
    assert [run["status"] for run in listed] == ["completed", "completed", "killed", "failed"]
    assert [stage["status"] for stage in listed[1]["stages"]] == ["failed", "completed"]
    assert listed[0]["values"] == {"val_loss": 0.2}
    assert listed[0]["memory"][1]["host"] == 3 * 2**30


def test_a_run_is_its_fit_also_after_a_test_of_the_trainer(dstrat, folder):
    test = begin(at=6, stage="test", plan={**PLAN, "strategy_alias": "other"}, metrics=None)
    write(
        folder / "logs" / "a", [begin(), epoch(10, 3), end(20, 5), test, end(0, 7, metrics={"test_loss": 1.0})], [0.5]
    )
    (listed,) = json.loads(dstrat("runs", "logs", "--json"))
    assert (listed["step"], listed["plan"]["strategy_alias"]) == (20, "ddp")
    assert listed["values"] == {"val_loss": 0.5, "test_loss": 1.0}


def test_a_checkpoint_that_maximizes_a_value_sorts_by_it(dstrat, folder):
    for name, value in (("a", 0.5), ("b", 0.75)):
        write(folder / "logs" / name, [begin(monitor={"name": "val_loss", "mode": "max"}), end(10, 5)], [value])
    assert [row[0] for row in rows(dstrat("runs", "logs", "--sort", "val_loss"))[1:]] == ["logs/b", "logs/a"]


def test_hyperparameters_beside_a_record_are_listed(dstrat, folder):
    (folder / "dstrat_logs" / "version_0" / "hparams.json").write_text('{"width": 16}')
    (folder / "dstrat_logs" / "version_1" / "hparams.json").write_text("[half written")
    assert [run["hyperparameters"] for run in json.loads(dstrat("runs", "--json"))] == [{"width": 16}, {}, {}, {}]


@pytest.mark.parametrize(("seconds", "text"), [(59.94, "59.9 s"), (61, "1:01"), (3 * 3600 + 61, "3:01:01")])
def test_times_are_as_long_as_they_need_to_be(seconds, text):
    assert describe_seconds(seconds) == text


def test_a_run_of_this_process_is_running_and_one_of_another_machine_unknown(dstrat, folder):
    write(folder / "logs" / "a", [begin(process=this_process())])
    write(folder / "logs" / "b", [begin(process={**this_process(), "host": "elsewhere"})])
    assert [row[1] for row in rows(dstrat("runs", "logs"))[1:]] == ["running", "unknown"]


def test_listing_and_drawing_leave_torch_out(folder):
    code = (
        "import sys\nfrom dstrat.cli.main import commands\n"
        "commands(sys.argv[1:], standalone_mode=False)\nassert 'torch' not in sys.modules"
    )
    for arguments in (["runs"], ["plot", "val_loss"]):
        subprocess.run([sys.executable, "-c", code, *arguments], check=True, timeout=400, stdout=subprocess.PIPE)


def test_a_folder_without_runs_says_where_they_come_from(dstrat, tmp_path):
    (tmp_path / "empty").mkdir()
    assert dstrat("runs", "empty").startswith("there are no runs here: a Trainer records each beside its logs")


def test_curves_are_drawn_within_the_columns_of_a_terminal(dstrat):
    lines = dstrat("plot", "val_loss").splitlines()
    assert lines[0] == "val_loss"
    assert max(map(len, lines)) <= 80
    assert lines[-3:] == [
        "a dstrat_logs/version_0: last 0.2, 2 values",
        "b dstrat_logs/version_1: last 0.1, 3 values",
        "c dstrat_logs/version_2: last 0.8, 1 values",
    ]
    chart = "\n".join(lines[1:-5])
    assert [chart.count(letter) > 0 for letter in "abc"] == [True, True, True]
    assert re.fullmatch(r" *0\.9 ┤b+", lines[1])
    assert lines[-5].split()[0].startswith("└")


@pytest.mark.parametrize(("terminal", "mark"), [("xterm", "a"), ("xterm-256color", "━━")])
def test_curves_are_letters_where_a_terminal_has_too_few_colours(folder, terminal, mark):
    environ = {"COLUMNS": "80", "FORCE_COLOR": "1", "TERM": terminal, "COLORTERM": "", "NO_COLOR": ""}
    printed = CliRunner(env=environ).invoke(commands, ["plot", "val_loss"], color=True).output
    assert re.search(rf"\x1b\[[0-9;]+m{mark}\x1b\[0m dstrat_logs/version_0", printed)


def test_one_curve_is_drawn_in_dots(dstrat):
    chart = dstrat("plot", "val_loss", "1")
    assert sum("\u2800" < character < "\u2900" for character in chart) > 30


class Page(HTMLParser):
    """Collects what a page loads, and its text."""

    def __init__(self, text):
        super().__init__()
        self.loads, self.text = [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        names = {"src", "href", "xlink:href", "data", "srcset"}
        self.loads += [value for name, value in attrs if name in names and not value.startswith("#")]
        self.loads += [tag] if tag in ("script", "link", "iframe") else []

    def handle_data(self, data):
        self.text += data


@pytest.mark.parametrize("suffix", ["png", "svg", "html"])
def test_plots_are_written_as_files(dstrat, folder, suffix):
    assert dstrat("plot", "val_loss", "0", "1", "--output", f"plot.{suffix}") == f"wrote plot.{suffix}\n"
    content = (folder / f"plot.{suffix}").read_bytes()
    assert {"png": b"\x89PNG", "svg": b"<svg ", "html": b"dstrat_logs/version_1"}[suffix] in content


def test_a_report_is_one_page_that_loads_nothing(dstrat, folder):
    assert dstrat("report", "version_1") == "wrote dstrat_logs/version_1/report.html\n"
    page = Page((folder / "dstrat_logs" / "version_1" / "report.html").read_text())
    assert page.loads == []
    for shown in (
        "rank 1 of 2 was killed by SIGKILL",
        "2.00 GiB more than before the run; the process 3.00 GiB",
        'Trainer(profiler="simple")',
        "train.py --name 'a b'",
        "val_loss",
        "<b>",  # escaped in the page
        "dstrat-ddp 0.1.0",
    ):
        assert shown in page.text, shown


def test_a_report_shows_speed_memory_and_attempts_to_scale(dstrat, folder):
    half = {"device": 2**30, "host": 0, "host_before": 0}
    first = [begin(), epoch(0, 2), {**failure(8), "traceback": "of rank 1"}, end(0, 8, "failed", traceback="of rank 0")]
    second = [begin(2, 10), epoch(10, 12), epoch(20, 14), end(30, 20, memory=[half, {**half, "device": 2**31}])]
    write(folder / "logs" / "a", [*first, *second], [1.0])
    dstrat("report", "logs/a", "--output", "page.html")
    html = (folder / "page.html").read_text()
    page = Page(html)
    assert "20 steps in 8.0 s, 2.5 per second" in page.text
    assert "Until the first epoch 2.0 s" in page.text
    assert re.findall(r"left: *([\d.]+)%; *width: *([\d.]+)%", html) == [("0.00", "40.00"), ("50.00", "50.00")]
    assert {"50.00", "100.00"} <= set(re.findall(r"width: *([\d.]+)%", html))  # of the ranks' memory
    assert "of rank 1" in page.text
    assert "of rank 0" not in page.text  # which has lost the connection


def test_throughput_is_that_between_epochs():
    stage = StageRun(begin=begin(), end=end(40, 9), epochs=[epoch(0, 1), epoch(10, 3), epoch(30, 5)])
    assert [(step, round(value, 6)) for step, value in _throughput(stage)] == [(10, 5.0), (30, 10.0), (40, 2.5)]


def test_a_quantity_of_training_and_validation_is_one_chart(tmp_path):
    write(tmp_path / "a", [begin()])
    (tmp_path / "a" / "metrics.csv").write_text("step,train_loss_step,train_loss_epoch,val_loss,rate\n1,4,3,2,1\n")
    charts = {title: [curve.label for curve in curves] for title, curves in _charts(read_run(tmp_path / "a"))}
    assert charts == {"loss": ["train_loss_step", "train_loss_epoch", "val_loss"], "rate": ["rate"]}


def test_epochs_without_a_step_or_in_one_tick_of_the_clock_have_no_throughput():
    stage = StageRun(begin=begin(), end=end(20, 5), epochs=[epoch(0, 1), epoch(0, 2), epoch(10, 2), epoch(20, 4)])
    assert _throughput(stage) == [(20, 5.0)]


def test_a_report_shows_times_of_phases_and_removed_checkpoints(dstrat, folder):
    phases = {"next_batch": 1.0, "training_step": 2.0, "backward": 3.0, "optimizer_step": 1.0, "Mine.on_train_end": 1.0}
    phases["setup"] = 4.0  # before the first epoch
    events = [begin(), epoch(0, 1), checkpoint(10, 5), end(10, 11, phases=phases)]
    write(folder / "logs" / "a", events, [1.0])
    dstrat("report", "logs/a", "--output", "page.html")
    text = " ".join(Page((folder / "page.html").read_text()).text.split())
    assert "data 1.0 s, 10 % forward 2.0 s, 20 % backward 3.0 s, 30 % optimizer 1.0 s, 10 %" in text
    assert "hooks and callbacks 1.0 s, 10 % everything else 2.0 s, 20 %" in text
    assert "removed since" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plot", "val_los"], "no run has logged 'val_los': did you mean val_loss?"),
        (["runs", "--sort", "speed"], "no run has logged 'speed': there are val_loss"),
        (["plot", "val_loss", "7"], "there is no run '7' here: dstrat runs lists those that there are"),
        (["plot", "val_loss", "3"], "no run has logged 'val_loss': none has logged any value"),
        (["plot", "val_loss", "--output", "a.gif"], "--output 'a.gif' must end in one of .html, .pdf, .png, .svg"),
    ],
)
def test_requests_that_cannot_be_met_say_what_can(dstrat, arguments, message):
    with pytest.raises(DstratError, match="^" + re.escape(message)):
        dstrat(*arguments)


def test_values_of_another_logger_are_listed_and_have_no_curve(dstrat, folder):
    write(folder / "logs" / "a", [begin(metrics=None), end(9, 5, metrics={"val_loss": 0.3})])
    assert rows(dstrat("runs", "logs"))[1][-1] == "0.3"
    with pytest.raises(DstratError, match=r"^no curve of 'val_loss' can be drawn: curves come from metrics.csv"):
        dstrat("plot", "val_loss", "logs/a")


def test_a_name_of_several_runs_is_refused_with_their_folders(dstrat, folder):
    write(folder / "other" / "version_0", [begin()])
    with pytest.raises(DstratError, match=r"is the name of 2 runs: write .*dstrat_logs/version_0"):
        dstrat("report", "0")


def test_a_run_outside_of_the_working_directory_is_named_by_its_whole_path(dstrat, folder, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "a"
    write(elsewhere, [begin(), end(10, 1)])
    assert str(elsewhere) in "".join(dstrat("runs", str(elsewhere.parent)).split())


def test_links_and_checkpoints_are_not_searched(dstrat, folder):
    (folder / "loop").symlink_to(folder)
    write(folder / "checkpoints" / "a", [begin()])
    assert len(rows(dstrat("runs"))) == 6
