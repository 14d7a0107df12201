"""Telling scripts from prompts, and what it costs to write a request down."""

from __future__ import annotations

import subprocess
import sys

import pytest

QUESTION = "from dstrat.resolve import is_interactive; print(is_interactive())"


def answer(*arguments, typed="", cwd=None):
    done = subprocess.run(
        [sys.executable, *arguments], input=typed, cwd=cwd, capture_output=True, text=True, timeout=400, check=True
    )
    return done.stdout.strip()


def test_a_script_is_not_interactive(tmp_path):
    (tmp_path / "script.py").write_text(QUESTION)
    assert answer("script.py", cwd=tmp_path) == "False"
    assert answer("-m", "script", cwd=tmp_path) == "False"


def test_a_script_in_a_notebooks_kernel_is_interactive(tmp_path):
    (tmp_path / "script.py").write_text(f"import sys; sys.modules['ipykernel'] = sys\n{QUESTION}")
    assert answer("script.py", cwd=tmp_path) == "True"


def test_the_worker_of_an_installed_program_is_interactive(tmp_path):
    package = tmp_path / "site-packages" / "program"
    package.mkdir(parents=True)
    (package / "worker.py").write_text(QUESTION)
    assert answer(str(package / "worker.py")) == "True"
    assert answer("-m", "program.worker", cwd=package.parent) == "False"


@pytest.mark.parametrize("arguments", [["-c", QUESTION], ["-"], ["-i"]])
def test_what_no_other_process_could_run_is_interactive(arguments):
    assert answer(*arguments, typed="" if "-c" in arguments else QUESTION + "\n") == "True"


def test_names_are_resolved_without_torch():
    code = "import sys, dstrat.resolve as r; r.Request(strategy='x'); r.Plan; r.PlanRow; print('torch' in sys.modules)"
    assert answer("-c", code) == "False"


def test_functions_are_found_by_name_whatever_was_imported_before():
    code = (
        "import dstrat.resolve.resolve, dstrat.resolve as r; print(callable(r.resolve_request), callable(r.make_plan))"
    )
    assert answer("-c", code) == "True True"


def test_unknown_names_are_attribute_errors():
    assert (
        answer("-c", "import dstrat.resolve as r; print(hasattr(r, 'nothing'), 'make_plan' in dir(r))") == "False True"
    )
