"""A user's script, started by dstrat and by horovodrun, and ranks that fail in it."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from packages.horovod.tests import horovod_program
from tests.warm_program import WarmProgram

SCRIPT = Path(horovod_program.__file__)
HOROVODRUN = Path(sys.executable).with_name("horovodrun")
NAMED = {
    "raise": "rank 1 of 2 failed: ValueError: rank 1 fails on purpose",
    "kill": "rank 1 of 2 was killed by SIGKILL",
    "leave": "rank 1 of 2 exited with code 0 before the others had ended: rank 0 lost the connection",
    "hang": "rank 1 of 2 hung: rank 0 timed out waiting for it",
}


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """Losses of one device, and what a test finds after them."""
    out = tmp_path_factory.mktemp("one_device") / "out.json"
    tested = horovod_program.train("single_device", 1, out)
    return json.loads(out.read_text())["losses"], tested


def check(out, printed, expected, cluster):
    losses, tested = expected
    result = json.loads(out.read_text())
    assert (result["world_size"], result["cluster"]) == (2, cluster)
    assert result["losses"] == pytest.approx(losses, rel=1e-6)
    assert [float(line.split()[-1]) for line in printed.splitlines() if "tested" in line] == [
        pytest.approx(tested, rel=1e-6)
    ] * printed.count("tested")
    assert "tested" in printed


def processes_with(path):
    """Return the processes that have a path in their command line."""
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                command = Path(entry.path, "cmdline").read_bytes()
            except OSError:
                continue
            if str(path).encode() in command:
                found.append(command)
    return found


def test_a_script_that_dstrat_starts_again_for_each_rank(tmp_path, expected):
    program = WarmProgram(SCRIPT, "horovod", str(tmp_path / "out.json"))
    check(tmp_path / "out.json", program.run(), expected, "local")


def test_another_start_method(tmp_path, expected):
    program = WarmProgram(SCRIPT, "forkserver", str(tmp_path / "out.json"))
    check(tmp_path / "out.json", program.run(), expected, "local")


@pytest.mark.parametrize("fault", NAMED)
def test_the_error_names_the_rank_that_fails(tmp_path, fault):
    program = WarmProgram(SCRIPT, "forkserver", str(tmp_path / "out.json"), fault)
    _, errors = program.communicate()
    assert program.returncode == 1
    assert f"RankFailedError: {NAMED[fault]}" in errors
    assert processes_with(tmp_path) == []


def horovodrun(*arguments, timeout=400):
    """Run the script under horovodrun; return its exit code and output."""
    command = [HOROVODRUN, "-np", "2", sys.executable, str(SCRIPT), *map(str, arguments)]
    environ = {**os.environ, "PATH": os.pathsep.join([str(HOROVODRUN.parent), os.environ["PATH"]])}
    process = subprocess.Popen(
        command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return process.returncode, output


@pytest.mark.parametrize("strategy", ["horovod", pytest.param("ddp", marks=pytest.mark.variant)])
def test_under_horovodrun(tmp_path, expected, strategy):
    code, printed = horovodrun(strategy, tmp_path / "out.json")
    assert code == 0, printed
    check(tmp_path / "out.json", printed, expected, "horovodrun")


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("raise", "ValueError: rank 1 fails on purpose"),
        pytest.param("kill", "Process name: 1\n", marks=pytest.mark.variant),
        pytest.param("leave", "rank 1 of 2 has ended already", marks=pytest.mark.variant),
        pytest.param("hang", "timed out waiting for rank 1 of 2", marks=pytest.mark.variant),
    ],
)
def test_a_rank_that_fails_under_horovodrun_is_named_and_nothing_survives(tmp_path, fault, message):
    code, printed = horovodrun("horovod", tmp_path / "out.json", fault)
    assert code != 0
    assert message in printed
    assert processes_with(tmp_path) == []
