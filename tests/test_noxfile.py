"""noxfile.py, run by a Python that has nothing installed, makes itself an environment with nox and goes on in it."""

import ast
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

NOXFILE = Path(__file__).parents[1] / "noxfile.py"
PRINTS = "import sys\ndef main(): print('nox was given', sys.argv[3:])\n"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with nothing but noxfile.py, beside an index with a nox that prints its arguments and an empty pip."""
    index = tmp_path / "index"
    index.mkdir()
    write_wheel(index, "nox", {"nox.py": PRINTS}, "[console_scripts]\nnox = nox:main\n")
    write_wheel(index, "pip", {})
    folder = tmp_path / "check out"
    folder.mkdir()
    shutil.copy(NOXFILE, folder)
    return folder


def write_wheel(index: Path, name: str, files: dict[str, str], entry_points: str = "") -> None:
    information = f"{name}-2026.1.1.dist-info"
    with zipfile.ZipFile(index / f"{name}-2026.1.1-py3-none-any.whl", "w") as wheel:
        for path, text in files.items():
            wheel.writestr(path, text)
        wheel.writestr(f"{information}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 2026.1.1\n")
        wheel.writestr(f"{information}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{information}/entry_points.txt", entry_points)
        wheel.writestr(f"{information}/RECORD", "")


def run(checkout: Path, index: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    environ |= {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": index.as_uri()}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=checkout, env=environ, capture_output=True, text=True, timeout=400, check=False)


WITH_A_BORROWED_PIP = """
import runpy, subprocess, sys

def run_but_venv(command, *, run=subprocess.run, **options):
    return run([sys.executable, "-c", ""] if "venv" in command else command, **options)

subprocess.run = run_but_venv
runpy.run_path("noxfile.py", run_name="__main__")
"""
"""Takes the environment that is there for a new one, as to make one takes several seconds."""


@pytest.mark.slow
def test_the_environment_is_made_once_and_again_after_a_failure(checkout: Path) -> None:
    goes_on = "nox was given ['-s', 'demo', '--', '--steps', '3']\n"
    command = ["noxfile.py", "-s", "demo", "--", "--steps", "3"]

    half_made = checkout / ".nox" / "bootstrap" / "bin" / "half-made"
    half_made.parent.mkdir(parents=True)
    half_made.touch()
    python = half_made.with_name("python")
    python.write_text(f"#!/bin/sh\nexec '{sys.executable}' \"$@\"\n")
    python.chmod(0o755)
    without_index = run(checkout, checkout.parent, "-c", WITH_A_BORROWED_PIP)
    assert without_index.returncode == 1
    assert "No matching distribution found for " in without_index.stderr
    assert without_index.stderr.endswith("name a mirror to pip (PIP_INDEX_URL=https://...)\n")
    assert "Traceback" not in without_index.stderr

    made = run(checkout, checkout.parent / "index", *command).stdout
    assert made.startswith("making the environment .nox/bootstrap\n")
    assert re.search(r"\n\.nox/bootstrap: \d+ distributions after \d+ s\n", made)
    assert made.endswith(goes_on)
    assert not half_made.exists()
    assert run(checkout, checkout.parent / "index", *command).stdout == goes_on


def test_without_ensurepip_the_message_says_what_to_install(checkout: Path) -> None:
    code = "import runpy, sys; sys.modules['ensurepip'] = None; runpy.run_path('noxfile.py', run_name='__main__')"
    result = run(checkout, checkout.parent / "index", "-c", code)
    assert result.returncode == 1
    assert "cannot make environments" in result.stderr
    assert result.stderr.endswith("apt install python3-venv\n")


def test_the_workflow_runs_every_session_of_the_test_command():
    text = NOXFILE.read_text(encoding="utf-8")
    listed = " ".join(re.findall(r"^(?:FIRST|REST) = \((.*?)\)", text, re.DOTALL | re.MULTILINE))
    workflow = (NOXFILE.parent / ".github" / "workflows" / "tests.yml").read_text(encoding="utf-8")
    run = " ".join(re.findall(r"sessions: (.*)", workflow)).split()
    assert {*re.findall(r'"(\w+)"', listed)} <= {"environments", *run}
    assert {"oldest", "newest"} <= {*run}


def test_variants_on_simulated_gpus_run_with_the_others():
    functions = ast.parse(NOXFILE.read_text(encoding="utf-8")).body
    (variants,) = (each for each in functions if isinstance(each, ast.FunctionDef) and each.name == "variants")
    assert "run_on_simulated_gpus(session, '-m', 'variant', *arguments)" in map(ast.unparse, ast.walk(variants))
