"""Taking command lines of Python apart."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from dstrat.errors import LaunchError
from dstrat.launch.command import Command, parse_command, rerun_command


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("python train.py --lr 1", Command(flags=(), kind="script", target="train.py", argv=("train.py", "--lr", "1"))),
        ("python -u train.py -u", Command(flags=("-u",), kind="script", target="train.py", argv=("train.py", "-u"))),
        (
            "python -Wd -X dev t.py",
            Command(flags=("-W", "d", "-X", "dev"), kind="script", target="t.py", argv=("t.py",)),
        ),
        ("python -uBX dev t.py", Command(flags=("-uB", "-X", "dev"), kind="script", target="t.py", argv=("t.py",))),
        ("python -ui t.py", Command(flags=("-u",), kind="script", target="t.py", argv=("t.py",))),
        ("python -m pack.age a", Command(flags=(), kind="module", target="pack.age", argv=("-m", "a"))),
        ("python -Ompack.age", Command(flags=("-O",), kind="module", target="pack.age", argv=("-m",))),
        ("python -c pass a", Command(flags=(), kind="code", target="pass", argv=("-c", "a"))),
        (
            "python --check-hash-based-pycs always t.py",
            Command(flags=("--check-hash-based-pycs", "always"), kind="script", target="t.py", argv=("t.py",)),
        ),
        ("python -- -t.py", Command(flags=(), kind="script", target="-t.py", argv=("-t.py",))),
        ("python", Command(flags=(), kind="interactive")),
        ("python -u -", Command(flags=("-u",), kind="interactive")),
    ],
)
def test_command_line_is_read_as_the_interpreter_reads_it(line, expected):
    assert parse_command(line.split()) == expected


def main_module(path=None, spec=None):
    module = ModuleType("__main__")
    module.__spec__ = spec
    if path is not None:
        module.__file__ = str(path)
    return module


def test_script_under_a_debugger_is_run_again_without_it(tmp_path):
    script = tmp_path / "train.py"
    script.touch()
    command = rerun_command(["python", "-m", "pdb", "train.py", "x"], ["train.py", "x"], main_module(script))
    assert command == Command(flags=(), kind="script", target=str(script), argv=("train.py", "x"))


def test_arguments_are_those_of_the_command_line_even_if_the_script_has_eaten_them(tmp_path):
    script = tmp_path / "train.py"
    script.touch()
    command = rerun_command(["python", "train.py", "x"], ["train.py"], main_module(script))
    assert command.argv == ("train.py", "x")


def test_module_is_run_again_as_a_module(tmp_path):
    main = main_module(tmp_path, SimpleNamespace(name="package.__main__"))
    assert rerun_command(["python", "-m", "package"], [], main).kind == "module"


@pytest.mark.parametrize("path", [None, "/no/such/file.py"])
def test_main_module_without_a_file_is_refused(path):
    with pytest.raises(LaunchError, match="notebook"):
        rerun_command(["python", "-m", "ipykernel_launcher"], [], main_module(path))


def test_interactive_session_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    script = tmp_path / "train.py"
    script.touch()
    with pytest.raises(LaunchError, match="interactive session"):
        rerun_command(["python", "-i", "train.py"], [], main_module(script))
