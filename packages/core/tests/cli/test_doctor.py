"""``dstrat doctor`` and its checks."""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from dstrat.builtin.accelerators.cpu import CPUAccelerator
from dstrat.cli.doctor import check_all_reduce, check_devices, check_evidence, check_leftovers, check_plugins
from dstrat.plugins.catalog import Catalog
from dstrat.plugins.component import Component

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def processes_with(variable: str) -> list[int]:
    """The processes, other than this one, that have inherited an environment variable."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environ = (folder / "environ").read_bytes()
        except OSError:
            continue
        if f"{variable}=".encode() in environ and int(folder.name) != os.getpid():
            found.append(int(folder.name))
    return found


@on_linux
def test_it_reports_on_everything_and_exits_with_1_where_there_is_a_problem(installed_dstrat):
    with subprocess.Popen(["sleep", "100"], env={**os.environ, "DSTRAT_JOB": "over"}) as orphan:
        report = installed_dstrat("doctor", "--json")
        orphan.kill()
    findings = {finding["subject"]: finding for finding in json.loads(report.stdout)["findings"]}
    assert {"python", "torch", "distributions", "accelerator cpu", "all-reduce on 2 processes"} <= set(findings)
    assert findings["all-reduce on 2 processes"]["state"] == "ok", findings
    assert findings["accelerator cpu"]["text"].endswith("collectives by gloo")
    assert findings[f"process {orphan.pid}"]["state"] == "problem"
    assert report.returncode == 1


class Asleep(CPUAccelerator):
    def is_available(self):
        return False

    def hint_unavailable(self):
        return "the key is off; turn it"


class Alone(CPUAccelerator):
    process_group_backend = "none"
    supports_torch_distributed = False


def test_an_accelerator_without_collectives_is_described_as_such():
    catalog = Catalog({})
    catalog.register(Component(kind="accelerator", alias="alone", target=Alone, summary=""))
    (finding,) = [finding for finding in check_devices(catalog) if finding.subject == "accelerator alone"]
    assert finding.text.endswith("(cpu), no collectives between processes")


class Driven(CPUAccelerator):
    def describe(self):
        return "driver 1.2"


def test_an_accelerator_says_what_drives_it():
    catalog = Catalog({})
    catalog.register(Component(kind="accelerator", alias="engine", summary="x", target=Driven))
    texts = {finding.subject: finding.text for finding in check_devices(catalog)}
    assert texts["accelerator engine"] == "1 by default (cpu), collectives by gloo; driver 1.2"


def test_an_accelerator_that_lacks_a_requirement_is_reported_once():
    catalog = Catalog({})
    catalog.register(Component(kind="accelerator", alias="far", summary="", target=Driven, requires=("no-such>=2",)))
    findings = [*check_plugins(catalog), *check_devices(catalog)]
    (finding,) = [finding for finding in findings if finding.subject == "accelerator far"]
    assert finding.state == "note"
    assert "needs no-such>=2" in finding.text


def test_a_package_that_several_components_lack_is_reported_once():
    catalog = Catalog({})
    for alias in ("far", "farther", "farthest"):
        component = Component(kind="accelerator", alias=alias, summary="", target=Driven, requires=("no-such>=2",))
        catalog.register(component)
    (finding,) = [finding for finding in check_plugins(catalog) if "no-such" in finding.text]
    assert finding.subject == "accelerator far and 2 more"
    assert "needs no-such>=2, which is not installed: pip install" in finding.text


def test_an_accelerator_says_why_it_is_not_there():
    catalog = Catalog({})
    catalog.register(Component(kind="accelerator", alias="asleep", target=Asleep, summary=""))
    (finding,) = [finding for finding in check_devices(catalog) if finding.subject == "accelerator asleep"]
    assert finding.text == "not on this machine: the key is off; turn it"


# The all-reduce


@pytest.fixture
def torch_of_ranks(tmp_path, monkeypatch):
    """Writes the module that the ranks import as torch, when they have begun."""

    def write(text):
        (tmp_path / "torch.py").write_text(text)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    return write


@on_linux
@pytest.mark.parametrize("seconds", [0.01, 2.5])
def test_the_all_reduce_has_a_time_limit_and_leaves_no_process(seconds, monkeypatch, torch_of_ranks):
    torch_of_ranks("import time; time.sleep(600)")  # longer than the test may take
    monkeypatch.setenv("DSTRAT_TEST_OF_THE_LIMIT", "1")
    (finding,) = check_all_reduce(seconds)
    assert finding.text.startswith(f"no result after {seconds:g} s")
    deadline = time.monotonic() + 300
    while (left := processes_with("DSTRAT_TEST_OF_THE_LIMIT")) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []


def test_a_time_limit_of_no_seconds_is_refused(installed_dstrat):
    report = installed_dstrat("doctor", "--seconds=0")
    assert report.returncode == 2
    assert "Invalid value for '--seconds': 0.0 is not in the range x>0." in report.stderr


def test_an_all_reduce_that_fails_says_why(torch_of_ranks):
    torch_of_ranks("raise OSError('no interface nothing0\\nin two lines')")
    (finding,) = check_all_reduce(60)
    assert finding.state == "problem"
    assert finding.text.startswith("failed with exit code 1: rank ")
    assert "nothing0" in finding.text
    assert "\n" not in finding.text


# Leftovers


@pytest.fixture
def temporary(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def wait_for_environment(pid):
    """Wait until the kernel shows the environment of a process, which it does a little after its start."""
    deadline = time.monotonic() + 300
    while not Path(f"/proc/{pid}/environ").read_bytes():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@on_linux
def test_processes_and_folders_of_jobs_that_are_over_are_found(temporary):
    folder = temporary / "dstrat-job-old"
    folder.mkdir()
    with subprocess.Popen(["sleep", "60"], env={**os.environ, "DSTRAT_JOB": str(folder)}) as orphan:
        wait_for_environment(orphan.pid)
        findings = {finding.subject: finding for finding in check_leftovers()}
        orphan.kill()
    process = findings[f"process {orphan.pid}"]
    assert (process.state, process.text) == ("problem", f"of a job that is over (sleep 60): kill {orphan.pid}")
    assert findings["folders"].text == f"1 of jobs that are over: rm -r {folder}"
    assert findings["folders"].state == "note"


RUNNING = """
import sys, time
from dstrat.launch.local import LocalLauncher

def wait():
    print("running", flush=True)
    time.sleep(60)

if __name__ == "__main__":
    LocalLauncher(num_processes=1, start_method="spawn").launch(wait)
"""


@on_linux
def test_a_running_job_is_not_left_over(temporary):
    script = temporary / "job.py"
    script.write_text(RUNNING)
    environ = {**os.environ, "TMPDIR": str(temporary), "DSTRAT_TEST_OF_A_JOB": "1"}
    with subprocess.Popen([sys.executable, str(script)], env=environ, stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout.readline() == "running\n"
        folders = list(temporary.glob("dstrat-job-*"))
        ranks = {f"process {pid}" for pid in processes_with("DSTRAT_TEST_OF_A_JOB")}
        findings = list(check_leftovers())
        job.kill()
    assert len(folders) == 1
    assert len(ranks) >= 2
    assert not ranks & {finding.subject for finding in findings}
    assert not [finding for finding in findings if str(folders[0]) in finding.text]


# Plugins and evidence


def test_broken_plugins_and_components_are_found(site, monkeypatch):
    site.add("doctor-bad", plugin="raise ValueError('no')")
    site.add("doctor-slow", plugin="import time\ntime.sleep(0.2)\n" + site.hook(site.component("slow_one")))
    site.add("doctor-wrong", site.component("wrong_one", "doctor_wrong.gone:Gone"))
    site.add("doctor-needy", site.component("needy_one", requires=("not-there>=1",)))
    site.add("doctor-twin", site.component("slow_one"))
    monkeypatch.syspath_prepend(str(site.folder))
    findings = {finding.subject: finding for finding in check_plugins(Catalog({"DSTRAT_DISABLE_PLUGINS": "nobody"}))}

    assert findings["doctor-bad 1.0"].text == "failed: ValueError: no"
    assert findings["doctor-bad 1.0"].state == "problem"
    assert findings["doctor-slow 1.0"].text.startswith("its plugin module took 0.2")
    assert findings["strategy wrong_one"].state == "problem"
    assert "doctor_wrong.gone" in findings["strategy wrong_one"].text
    assert findings["strategy needy_one"].text.endswith('pip install "not-there>=1"')
    assert findings["strategy needy_one"].state == "note"
    assert "is offered by doctor-slow 1.0 and doctor-twin 1.0" in findings["strategy slow_one"].text
    assert findings["DSTRAT_DISABLE_PLUGINS"].text == "names distributions without an installed plugin: nobody"


def test_the_rank_is_told_where_something_has_started_this_process():
    torchrun = {
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "RANK": "3",
        "LOCAL_RANK": "1",
        "GROUP_RANK": "1",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29500",
    }
    findings = {finding.subject: finding.text for finding in check_evidence(Catalog({}), torchrun)}
    assert findings["torchelastic"].endswith("rank 3 of 4, machine 1")


def test_an_environment_that_contradicts_itself_is_a_problem():
    (finding, *_) = check_evidence(Catalog({}), {"TORCHELASTIC_RUN_ID": "none", "RANK": "first", "WORLD_SIZE": "4"})
    assert finding.state == "problem"
    assert "RANK" in finding.text
    assert "raised" not in finding.text


def test_nothing_is_told_where_nothing_has_started_this_process():
    (finding,) = check_evidence(Catalog({}), {})
    assert (finding.state, finding.text) == ("ok", "nothing else has started this process")
