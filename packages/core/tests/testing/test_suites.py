"""A test class keeps every standard test of its suite, and fails where it is declared to."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import ClassVar

import pytest

from dstrat.errors import CatalogError, MisuseError
from dstrat.testing import (
    AcceleratorSuite,
    CheckpointIOSuite,
    ClusterEnvironmentSuite,
    LayoutSuite,
    PluginSuite,
    PrecisionSuite,
    StrategySuite,
)
from dstrat.testing.run import run_suite
from dstrat.testing.suite import CAPABILITIES, standard_tests

SUITES = (
    *(AcceleratorSuite, CheckpointIOSuite, ClusterEnvironmentSuite, PluginSuite, PrecisionSuite),
    *(StrategySuite, LayoutSuite),
)
TIERS = ("basic", "optional", "processes", "device")


def test_a_standard_test_cannot_be_replaced():
    with pytest.raises(MisuseError, match=r"Mine.test_it_can_be_pickled replaces a standard test.*expected_failures"):

        class Mine(StrategySuite):
            def test_it_can_be_pickled(self):
                pass


def test_a_standard_test_cannot_be_set_to_none():
    with pytest.raises(MisuseError, match="replaces a standard test"):

        class Mine(StrategySuite):
            test_it_can_be_pickled = None


def test_a_standard_test_cannot_be_replaced_by_a_mixin():
    class Mixin:
        test_it_can_be_pickled = None

    with pytest.raises(MisuseError, match="replaces a standard test"):

        class Mine(Mixin, StrategySuite):
            pass


def test_parts_of_the_kit_cannot_be_replaced():
    with pytest.raises(MisuseError, match=r"Mine\.job replaces a part of the conformance kit: choose another name"):

        class Mine(StrategySuite):
            def job(self):
                pass


def test_what_is_expected_to_fail_must_exist_and_have_a_reason():
    with pytest.raises(MisuseError, match="names 'test_nothing', not a standard test: possible are test_"):

        class Mine(AcceleratorSuite):
            expected_failures: ClassVar = {"test_nothing": "it is not there"}

    with pytest.raises(MisuseError, match="gives no reason for"):

        class Other(AcceleratorSuite):
            expected_failures: ClassVar = {"test_it_says_whether_it_is_available": " "}


def test_an_author_may_add_tests_and_settings():
    class Mine(StrategySuite):
        alias = "mine"
        world_sizes = (2,)

        def test_of_mine(self):
            pass

    assert "test_of_mine" not in standard_tests(Mine)
    assert standard_tests(Mine) == standard_tests(StrategySuite)


def test_every_test_of_a_suite_is_a_standard_test_of_a_known_tier():
    for suite in SUITES:
        names = {name for name in dir(suite) if name.startswith("test_")}
        assert names == set(standard_tests(suite))
        assert {test.tier for test in standard_tests(suite).values()} <= set(TIERS)
        assert {test.capability for test in standard_tests(suite).values()} <= set(CAPABILITIES)


def test_no_two_parts_of_the_strategy_suite_have_the_same_name():
    seen: dict[str, str] = {}
    for part in StrategySuite.__mro__[1:-1]:
        for name in vars(part):
            if name.startswith("__") or name in {"kind", "settings", "pytest_generate_tests"}:
                continue
            assert seen.setdefault(name, part.__name__) == part.__name__, name


WRITTEN = """
from dstrat.testing import PrecisionSuite

class Test32(PrecisionSuite):
    alias = "32-true"
    options = {"precision": "64-true"}
    expected_failures = {"test_its_flag_is_its_alias": "it is called so"%s}
"""


@pytest.mark.usefixtures("quick_collections")
@pytest.mark.parametrize("more", ["", ', "test_it_clips_to_the_limit": "a guess"'])
def test_an_expected_failure_is_told_of_and_one_that_passes_is_a_failure(tmp_path, more):
    file = tmp_path / f"{tmp_path.name}.py"
    file.write_text(WRITTEN % more)
    results = {result.name: result for result in run_suite("precision", "32-true", tiers=TIERS, path=file)}
    assert len(results) == len(standard_tests(PrecisionSuite))
    flag = results.pop("test_its_flag_is_its_alias")
    assert (flag.outcome, flag.message) == ("expected failure", "it is called so")
    failed = {name for name, result in results.items() if result.outcome == "failed"}
    assert failed == ({"test_it_clips_to_the_limit"} if more else set())


def test_a_class_without_an_alias_says_so():
    with pytest.raises(MisuseError, match=r'set alias = "\.\.\." to the name that users write'):
        AcceleratorSuite().component  # noqa: B018 - the look-up is what is tested


def test_an_alias_that_nobody_offers_is_the_catalogs_error():
    suite = type("TestMine", (AcceleratorSuite,), {"alias": "abacus"})
    with pytest.raises(CatalogError, match="accelerator 'abacus' is not known"):
        suite().component  # noqa: B018 - as above


def test_dstrat_does_not_import_the_kit_or_pytest():
    code = "import sys, dstrat, dstrat.cli.main; assert not {'dstrat.testing', 'pytest', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=400)


def test_without_pytest_the_kit_says_what_to_install(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("dstrat.testing")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pytest", None)
    with pytest.raises(ImportError, match=r'pip install "dstrat\[testing\]"'):
        __import__("dstrat.testing.suite")


class _WithVariable(StrategySuite):
    alias = "single_device"
    world_sizes = (1,)
    environ: ClassVar = {"DSTRAT_TESTED_VARIABLE": "of the suite"}


class _WithVariableOfTeam(StrategySuite):
    alias = "single_device"
    world_sizes = (1,)
    environ: ClassVar = {"DSTRAT_TESTED_VARIABLE": "team {job}"}


class _WithoutVariable(StrategySuite):
    alias = "single_device"
    world_sizes = (1,)


def variable(place):
    return os.environ.get("DSTRAT_TESTED_VARIABLE")


@pytest.mark.parametrize("new", [False, True])
def test_ranks_have_the_environment_that_their_suite_declares(new):
    assert _WithVariable().job(variable, 1, needs_new_ranks=new) == ["of the suite"]
    assert _WithoutVariable().job(variable, 1, needs_new_ranks=new) == [None]


def test_each_team_of_ranks_has_a_number_in_its_environment():
    suite = _WithVariableOfTeam()
    (first,), (again,) = suite.job(variable, 1), suite.job(variable, 1)
    (other,) = suite.job(variable, 1, needs_new_ranks=True)
    assert first.removeprefix("team ").isdecimal()
    assert first == again != other


def test_what_depends_on_time_is_not_compared_where_that_is_declared():
    class Mine(StrategySuite):
        alias = "single_device"
        is_deterministic = False

    for name in (
        "test_a_second_fit_in_the_same_processes_equals_the_first",
        "test_a_validation_in_between_leaves_the_training_as_it_was",
    ):
        with pytest.raises(pytest.skip.Exception, match="single_device declares is_deterministic = False"):
            getattr(Mine(), name)(2)
