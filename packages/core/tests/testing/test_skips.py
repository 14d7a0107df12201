"""However a standard test is dropped, pytest says so: one error for a class, or a failure for each test."""

from __future__ import annotations

import contextlib
import io

import pytest

pytestmark = pytest.mark.usefixtures("quick_collections")
HEAD = """
import unittest
import pytest
from dstrat.testing.suite import not_declared
from dstrat.testing.suite import standard
from dstrat.testing.suite import Suite

class Small(Suite):
    __module__ = "dstrat.testing.small"
    kind = "strategy"

    @standard("basic", "record")
    def test_one(self):
        pass

    @standard("basic", "record")
    def test_two(self):
        not_declared("it has no two")

    @standard("basic", "record")
    def test_three(self):
        assert self.alias != "wrong"

class Mixin:
    pytestmark = [pytest.mark.skip(reason='later')]

"""
NOT_COLLECTED = {
    "a mark": "@pytest.mark.skip(reason='later')\nclass TestMine(Small): pass",
    "a mark with a condition": "@pytest.mark.skipif(True, reason='later')\nclass TestMine(Small): pass",
    "an expected failure": "@pytest.mark.xfail(reason='later')\nclass TestMine(Small): pass",
    "marks of the class": "class TestMine(Small):\n    pytestmark = pytest.mark.skip",
    "marks of a mixin": "class TestMine(Mixin, Small): pass",
    "marks of the module": "pytestmark = [pytest.mark.skip]\nclass TestMine(Small): pass",
    "a decorated method": "class TestMine(Small): pass\npytest.mark.skip(TestMine.test_one)",
    "__test__": "class TestMine(Small):\n    __test__ = False",
    "__test__ afterwards": "class TestMine(Small): pass\nTestMine.__test__ = False",
    "__init__": "class TestMine(Small):\n    def __init__(self): pass",
    "__new__": "class TestMine(Small):\n    def __new__(cls): return super().__new__(cls)",
    "changed afterwards": "class TestMine(Small): pass\nTestMine.test_one = lambda self: None",
}
SAID = {
    "__test__": "TestMine.__test__ is False, which would drop its standard tests: remove it",
    "__test__ afterwards": "TestMine.__test__ is False, which would drop its standard tests: remove it",
    "__init__": "TestMine has __init__, and pytest collects no class that has",
    "__new__": "TestMine has __new__, and pytest collects no class that has",
    "an expected failure": "TestMine is marked xfail, which would drop standard tests of TestMine: take the mark away",
    "a mark with a condition": "TestMine is marked skipif, which would drop",
    "marks of the module": ".py is marked skip, which would drop standard tests of TestMine",
    "a decorated method": "test_one is marked skip, which would drop standard tests of TestMine",
    "changed afterwards": "TestMine.test_one replaces a standard test",
}
SKIPPED = {
    "a fixture": "    @pytest.fixture(autouse=True)\n    def no(self):\n        pytest.skip('later')",
    "a set-up": "    def setup_method(self):\n        pytest.skip('later')",
    "a set-up of the class": "    def setup_class(self):\n        pytest.skip('later')",
    "unittest": "    def setup_method(self):\n        raise unittest.SkipTest('later')",
    "pytest.xfail": "    def setup_method(self):\n        pytest.xfail('later')",
    "a mark of a fixture": (
        "    @pytest.fixture(autouse=True)\n    def no(self, request):\n"
        "        request.applymarker(pytest.mark.xfail(reason='later', run=False))"
    ),
}
CONFTEST = """
import pytest

def pytest_collection_modifyitems(items):
    for item in items:
        item.add_marker(pytest.mark.%s)
"""


class Reports:
    """Keeps what pytest reports of files, by their names, and of tests."""

    def __init__(self):
        self.errors, self.tests = {}, {}

    def pytest_collectreport(self, report):
        if report.failed:
            self.errors.setdefault(report.fspath.rpartition("/")[2], []).append(str(report.longrepr))

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or not report.passed:
            self.tests[report.nodeid.rpartition("::")[2]] = (report.outcome, str(report.longrepr))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Runs pytest on files, as their author does; returns its exit code and what it reports."""

    def run(*texts, options=(), conftest=""):
        folder = tmp_path_factory.mktemp("author")
        (folder / "pytest.ini").write_text("[pytest]\n")
        (folder / "conftest.py").write_text(conftest)
        for number, text in enumerate(texts):
            (folder / f"test_{number}_of_{folder.name}.py").write_text(f"{HEAD}{text}\n")
        reports = Reports()
        arguments = [str(folder), "--rootdir", str(folder), "--import-mode=importlib", "-p", "no:cacheprovider"]
        with contextlib.redirect_stdout(io.StringIO()):
            return pytest.main([*arguments, *options], plugins=[reports]), reports

    return run


@pytest.fixture(scope="module")
def not_collected(run):
    """What is said of each way, from one run."""
    code, reports = run(*NOT_COLLECTED.values())
    assert code == pytest.ExitCode.INTERRUPTED
    by_number = {int(file.split("_")[1]): errors for file, errors in reports.errors.items()}
    return {way: by_number.get(number, []) for number, way in enumerate(NOT_COLLECTED)}


@pytest.mark.parametrize("way", NOT_COLLECTED)
def test_a_class_that_would_drop_tests_is_one_error(not_collected, way):
    (error,) = not_collected[way]
    assert SAID.get(way, "TestMine is marked skip, which would drop standard tests of TestMine: take the mark") in error


@pytest.mark.parametrize("way", SKIPPED)
def test_what_skips_a_standard_test_is_a_failure(run, way):
    code, reports = run(f"class TestMine(Small):\n{SKIPPED[way]}")
    assert code == pytest.ExitCode.TESTS_FAILED
    assert [outcome for outcome, _ in reports.tests.values()] == ["failed"] * 3
    who = "expected to fail by a mark or a call of pytest.xfail" if "xfail" in SKIPPED[way] else "skipped with 'later'"
    for _, said in reports.tests.values():
        assert said.startswith(f"{who}, and a standard test cannot be skipped: take that away; what fails for a good")


@pytest.mark.parametrize("mark", ["skip(reason='later')", "xfail(reason='later')"])
def test_marks_that_come_after_collection_drop_nothing(run, mark):
    _, reports = run("class TestMine(Small):\n    alias = 'wrong'", conftest=CONFTEST % mark)
    assert reports.tests["test_three"][0] == "failed"
    assert reports.tests["test_one"][0] == ("failed" if "skip" in mark else "passed")


def test_the_kits_own_skips_and_what_is_declared_stay_as_they_are(run):
    own = "    @pytest.mark.skip\n    def test_of_mine(self): pass"
    declared = "    alias = 'wrong'\n    expected_failures = {'test_three': 'it is'}"
    code, reports = run(f"class TestMine(Small):\n{declared}\n{own}")
    assert code == pytest.ExitCode.OK
    assert {name: outcome for name, (outcome, _) in reports.tests.items()} == {
        "test_one": "passed",
        "test_two": "skipped",
        "test_three": "skipped",  # which is what pytest calls an expected failure
        "test_of_mine": "skipped",
    }
    assert "NotDeclared: it has no two" in reports.tests["test_two"][1]


def test_users_may_deselect(run):
    code, reports = run("class TestMine(Small): pass", options=["-k", "one"])
    assert code == pytest.ExitCode.OK
    assert list(reports.tests) == ["test_one"]


@pytest.mark.slow
def test_workers_of_xdist_see_to_it_too(run):
    _, reports = run(f"class TestMine(Small):\n{SKIPPED['a fixture']}", options=["-n", "1"])
    assert [outcome for outcome, _ in reports.tests.values()] == ["failed"] * 3
