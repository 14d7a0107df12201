"""``dstrat test``: a table, the advice of what failed, JSON, and the exit code."""

import json

import pytest
from click.testing import CliRunner

from dstrat.cli.main import commands
from dstrat.testing import PrecisionSuite
from dstrat.testing.suite import CAPABILITIES, standard_tests

pytestmark = pytest.mark.usefixtures("quick_collections")
WRITTEN = """
from dstrat.testing import PrecisionSuite

class Test32(PrecisionSuite):
    alias = "32-true"
    options = {"precision": "64-true"}
    expected_failures = %s
"""


@pytest.fixture
def mine(tmp_path):
    """Writes the author's test file."""
    file = tmp_path / f"{tmp_path.name}.py"
    return lambda text: (file.write_text(text), file)[1]


@pytest.fixture
def run():
    return lambda *arguments: CliRunner().invoke(commands, ["test", *map(str, arguments)])


def test_it_prints_a_line_for_each_capability(run):
    done = run("32-true", "--kind", "precision")
    assert done.exit_code == 0, done.output
    header, *lines = done.output.splitlines()
    assert header == "capability  passed  failed  expected failure  not declared  seconds"
    assert [line.split()[0] for line in lines] == ["record", "dtypes", "steps", "state"]


def test_what_fails_gives_its_advice_and_the_exit_code(run, mine):
    done = run("32-true", mine(WRITTEN % {}), "--kind", "precision")
    assert done.exit_code == 1
    assert "test_its_flag_is_its_alias\nflag is '64-true', and users write precision='32-true'" in done.output


MANY = """
import pytest
from dstrat.testing import PrecisionSuite
from dstrat.testing.suite import fail
from dstrat.testing.suite import standard

class Mine(PrecisionSuite):
    __module__ = "dstrat.testing.mine"

    @standard("basic", "steps")
    @pytest.mark.parametrize("size", [2, 4])
    def test_many(self, size):
        fail("seen " * 30 + str(size / 3), details="as it is " * 20)

class Test32(Mine):
    alias = "32-true"
"""


def test_failures_that_differ_in_numbers_only_are_told_once_as_wide_as_the_terminal(run, mine, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    output = run("32-true", mine(MANY), "--kind", "precision").output
    assert "\ntest_many[2]\ntest_many[4]\nseen seen" in output
    assert output.count("0.66666") == 1
    assert max(len(line) for line in output.splitlines() if line.lstrip().startswith("seen")) <= 60
    assert "  | " + ("as it is " * 20).rstrip() in output
    assert output.endswith("2 of 13 tests failed: begin with 'steps', as later ones rest on earlier ones\n")


def test_what_is_expected_to_fail_is_listed(run, mine):
    done = run("32-true", mine(WRITTEN % {"test_its_flag_is_its_alias": "it is called so"}), "--kind", "precision")
    assert done.exit_code == 0
    assert done.output.rstrip().endswith("expected to fail:\n  it is called so\n    test_its_flag_is_its_alias")


UNDECLARED = """
import pytest
from dstrat.testing import PrecisionSuite
from dstrat.testing.suite import not_declared
from dstrat.testing.suite import standard

class Mine(PrecisionSuite):
    __module__ = "dstrat.testing.mine"

    @standard("basic", "steps")
    @pytest.mark.parametrize("size", [2, 4])
    def test_many(self, size):
        not_declared("it takes: one")

class Test32(Mine):
    alias = "32-true"
"""


def test_why_a_test_was_not_declared_is_told_once_for_all_its_cases(run, mine):
    done = run("32-true", mine(UNDECLARED), "--kind", "precision")
    assert done.exit_code == 0
    assert done.output.endswith("\nnot declared:\n  it takes: one\n    test_many[2][4]\n")


@pytest.mark.parametrize(
    "settings",
    [
        {"pytest.ini": "[pytest]\naddopts = -x -k clips -m nothing\npython_functions = test_it_*\nmarkers = nothing"},
        {"conftest.py": "def pytest_collection_modifyitems(items):\n    del items[:-1]\n"},
    ],
)
def test_a_project_that_runs_fewer_tests_does_not_make_the_table_shorter(run, mine, tmp_path, settings):
    for name, text in settings.items():
        (tmp_path / name).write_text(text)
    mine(WRITTEN % {})
    tests = json.loads(run("32-true", tmp_path, "--kind", "precision", "--json").output)["tests"]
    assert {test["name"] for test in tests} == set(standard_tests(PrecisionSuite))
    order = [CAPABILITIES.index(test["capability"]) for test in tests]
    assert order == sorted(order)
    never_run = [test for test in tests if "it was not run: the project of the test file" in test["message"]]
    assert len(never_run) == (len(tests) - 1 if "conftest.py" in settings else 0)
    assert {test["outcome"] for test in never_run} <= {"failed"}


def test_json_has_every_test(run):
    found = json.loads(run("cpu", "--kind", "accelerator", "--tier", "basic", "--json").output)
    assert (found["alias"], found["kind"]) == ("cpu", "accelerator")
    assert {test["outcome"] for test in found["tests"]} == {"passed"}
    assert {test["tier"] for test in found["tests"]} == {"basic"}


def test_a_file_without_a_class_for_the_alias_is_an_error(run, mine):
    done = run("cpu", mine(WRITTEN % {}), "--kind", "accelerator")
    assert "there is no test class with alias = 'cpu'" in str(done.exception)


def test_the_settings_of_the_authors_project_do_not_stand_in_the_way(run, tmp_path):
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -ra -q --tb=short -n 2 --import-mode=importlib\n")
    (tmp_path / "test_of_mine.py").write_text(WRITTEN % {"test_its_flag_is_its_alias": "it is called so"})
    done = run("32-true", tmp_path, "--kind", "precision")
    assert done.output.startswith("capability  passed"), done.output
    assert done.exit_code == 0


def test_a_project_with_which_pytest_cannot_begin_is_an_error(run, tmp_path):
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --no-such-option\n")
    done = run("32-true", tmp_path, "--kind", "precision")
    assert f"pytest cannot begin with {tmp_path}: what it says is above" in str(done.exception)
