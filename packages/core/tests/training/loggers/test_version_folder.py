from __future__ import annotations

import subprocess
import sys

import pytest

from dstrat import CSVLogger
from dstrat.errors import LoggerError, RequestError
from dstrat.training.loggers.folder_logger import VersionFolder

CLAIM = """
import sys
from pathlib import Path
from dstrat.training.loggers.folder_logger import VersionFolder
print("ready", flush=True)
sys.stdin.readline()
for _ in range(100):
    print(VersionFolder().claim(Path(sys.argv[1]) / "logs", None))
"""


def test_the_first_run_gets_version_0_and_the_next_one_follows_the_highest(tmp_path):
    assert VersionFolder().claim(tmp_path / "logs", None) == tmp_path / "logs" / "version_0"
    (tmp_path / "logs" / "version_7").mkdir()
    (tmp_path / "logs" / "version_x").mkdir()
    assert VersionFolder().claim(tmp_path / "logs", None) == tmp_path / "logs" / "version_8"


def test_a_folder_is_claimed_once_and_then_kept(tmp_path):
    folder = VersionFolder()
    assert folder.claim(tmp_path / "logs", None) == folder.claim(tmp_path / "logs", None)
    assert [entry.name for entry in (tmp_path / "logs").iterdir()] == ["version_0"]


def test_runs_that_start_at_the_same_moment_get_different_folders(tmp_path):
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", CLAIM, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    assert [process.stdout.readline() for process in processes] == ["ready\n"] * 3
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    claimed = [line for process in processes for line in process.communicate(timeout=400)[0].split()]
    assert len(claimed) == 300
    assert len(set(claimed)) == 300


@pytest.mark.parametrize(("version", "name"), [(3, "version_3"), ("trial", "trial")])
def test_a_version_that_is_asked_for_is_used_also_when_it_exists(tmp_path, version, name):
    for _ in range(2):
        assert VersionFolder().claim(tmp_path / "logs", version) == tmp_path / "logs" / name


def test_without_a_root_the_working_directory_is_used(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert CSVLogger(name="logs").claimed_dir == tmp_path / "logs" / "version_0"


@pytest.mark.parametrize("version", [1.5, True, ["a"]])
def test_a_version_of_another_kind_is_refused(version):
    with pytest.raises(RequestError, match=r"version=.* must be a number, a folder's name, or None"):
        CSVLogger(name="logs", version=version)


@pytest.mark.parametrize(("name", "version"), [("a" * 300, None), ("logs", "b" * 300)])
def test_a_name_that_is_too_long_says_what_to_choose(tmp_path, name, version):
    with pytest.raises(LoggerError, match=r"[Ff]ile name too long: .*choose another save_dir, name or version"):
        VersionFolder().claim(tmp_path / name, version)
