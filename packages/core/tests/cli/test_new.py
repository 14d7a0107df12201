"""``dstrat new``: packages whose tests pass at once, and names that are refused before anything is written."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from click.testing import CliRunner

from dstrat.cli.new.command import Names, make_names, new
from dstrat.errors import DstratError
from dstrat.plugins.catalog import refresh_catalog
from dstrat.plugins.component import KINDS

if find_spec("copier") is None:  # which every worker of pytest-xdist would import, and one needs
    pytest.skip("needs the extra dstrat[new]", allow_module_level=True)

WORKSPACE = Path(__file__).parents[4]


def run_new(*arguments: object) -> str:
    """Run the command in this process; errors come out as they are."""
    result = CliRunner().invoke(new, [str(argument) for argument in arguments], standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return result.output


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_a_package_has_all_that_one_needs(tmp_path):
    run_new(tmp_path / "dstrat-ring")
    assert files(tmp_path) == {
        f"dstrat-ring/{name}"
        for name in (
            ".github/workflows/test.yml",
            ".gitignore",
            "README.md",
            "pyproject.toml",
            "src/dstrat_ring/__init__.py",
            "src/dstrat_ring/plugin.py",
            "src/dstrat_ring/py.typed",
            "src/dstrat_ring/strategy.py",
            "tests/test_strategy.py",
        )
    }


def test_a_package_has_no_upper_bound_on_dstrat(tmp_path):
    run_new(tmp_path / "dstrat-ring")
    assert 'dependencies = ["dstrat>=0.1"]' in (tmp_path / "dstrat-ring" / "pyproject.toml").read_text()


def test_what_comes_next_is_said(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run_new("dstrat-ring").splitlines() == [
        "dstrat-ring has the strategy 'ring', dstrat_ring.RingStrategy. To test it:",
        '  pip install -e "dstrat-ring[dev]"',
        "  pytest dstrat-ring",
    ]


def test_an_empty_folder_and_one_below_missing_ones_are_filled(tmp_path):
    (tmp_path / "dstrat-empty").mkdir()
    run_new(tmp_path / "dstrat-empty")
    run_new(tmp_path / "a" / "b" / "dstrat-deep")
    assert {path.name for path in tmp_path.iterdir()} == {"dstrat-empty", "a"}
    assert (tmp_path / "a" / "b" / "dstrat-deep" / "pyproject.toml").is_file()


def test_the_folder_that_one_is_in_is_filled(tmp_path, monkeypatch):
    folder = tmp_path / "dstrat-here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    run_new(".")
    assert Path("pyproject.toml").is_file()
    assert not list(tmp_path.glob(".dstrat-new-*"))
    assert not list(folder.glob(".dstrat-new-*"))


@pytest.mark.parametrize(
    ("kind", "folder", "alias", "names"),
    [
        ("strategy", "dstrat-ring", None, ("dstrat-ring", "dstrat_ring", "ring", "RingStrategy")),
        ("strategy", "My.Strategy", None, ("my-strategy", "my_strategy", "my_strategy", "MyStrategy")),
        ("precision", "acme_fp8", "fp8-mixed", ("acme-fp8", "acme_fp8", "fp8-mixed", "Fp8MixedPrecision")),
        ("checkpoint_io", "acme", "my_checkpoint_io", ("acme", "acme", "my_checkpoint_io", "MyCheckpointIO")),
        ("accelerator", "acme", "accelerator", ("acme", "acme", "accelerator", "AcceleratorAccelerator")),
        ("cluster_environment", "acme", "flux", ("acme", "acme", "flux", "FluxEnvironment")),
    ],
)
def test_names_follow_from_the_folder_and_the_alias(kind, folder, alias, names):
    distribution, package, alias_, class_name = names
    expected = Names(distribution=distribution, package=package, alias=alias_, class_name=class_name)
    assert make_names(kind, folder, alias) == expected


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["class"], "'class' cannot be the name of a package: begin with a letter"),
        (["1st"], "'1st' cannot be the name of a package"),
        (["two words"], "'two words' cannot be the name of a package"),
        (["-x-"], "'-x-' cannot be the name of a package"),
        (["größe"], "'größe' cannot be the name of a package"),
        (["Torch"], "Python has a module 'torch' already: choose another one, such as 'dstrat-torch'"),
        (["dstrat-x", "--alias", "Ring"], "alias 'Ring' is not possible here: begin with a lower-case letter"),
        (["dstrat-x", "--alias", "a b"], "alias 'a b' is not possible here"),
        (["dstrat-x", "--alias", '"'], "alias '\"' is not possible here"),
        (["dstrat-x", "--alias", "ring_"], "alias 'ring_' is not possible here"),
        (["dstrat-x", "--alias", "single_device"], "alias 'single_device' belongs to dstrat 0.1.0"),
        (["dstrat-x", "--alias", "gpu", "--kind", "accelerator"], "alias 'gpu' belongs to dstrat"),
        (["dstrat-x", "--alias", "hivemind"], "alias 'hivemind' belongs to dstrat-hivemind"),
    ],
)
def test_bad_names_are_refused_before_anything_is_written(tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DstratError) as refusal:
        run_new("--", *arguments) if arguments[0].startswith("-") else run_new(*arguments)
    assert words in str(refusal.value)
    assert not list(tmp_path.iterdir())


def test_a_folder_with_something_in_it_is_left_alone(tmp_path):
    (tmp_path / "dstrat-ring").mkdir()
    (tmp_path / "dstrat-ring" / "notes").write_text("mine")
    with pytest.raises(DstratError, match=r"dstrat-ring' is not empty \(it has 'notes'\): choose a new folder"):
        run_new(tmp_path / "dstrat-ring")
    assert files(tmp_path) == {"dstrat-ring/notes"}


def test_a_file_is_left_alone(tmp_path):
    (tmp_path / "dstrat-ring").write_text("mine")
    with pytest.raises(DstratError, match="dstrat-ring' is a file: choose a new folder"):
        run_new(tmp_path / "dstrat-ring")
    assert (tmp_path / "dstrat-ring").read_text() == "mine"


@pytest.mark.parametrize("folder_exists", [False, True])
def test_nothing_is_left_where_writing_fails(tmp_path, monkeypatch, folder_exists):
    if folder_exists:
        (tmp_path / "dstrat-ring").mkdir()
    before = set(tmp_path.rglob("*"))
    rename = Path.rename

    def rename_some(path, target):
        if path.name in ("dstrat-ring", "pyproject.toml"):
            raise OSError(28, "No space left on device")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", rename_some)
    with pytest.raises(DstratError, match=r"cannot be written \(No space left on device\): choose another place"):
        run_new(tmp_path / "dstrat-ring")
    assert set(tmp_path.rglob("*")) == before


def test_without_copier_the_error_says_how_to_get_it(dstrat, site):
    done = dstrat("new", "dstrat-ring")
    assert done.returncode == 2
    assert done.stderr == 'dstrat: dstrat new needs copier, which is not installed: pip install "dstrat[new]"\n'
    assert not (site.folder / "dstrat-ring").exists()


def test_an_alias_of_another_installed_package_is_refused(dstrat, site):
    site.add("acme-ring", site.component("ring", "acme_ring.strategy:Ring"))
    done = dstrat("new", "dstrat-ring")
    assert (
        "alias 'ring' belongs to acme-ring 1.0, and with both packages installed neither could be used by it"
        in done.stderr
    )


PUBLIC = {"dstrat", "dstrat.errors", "dstrat.launch", "dstrat.testing"}
"""The modules whose names stay as they are, see docs/compatibility.md."""


def imported_modules(file: Path) -> set[str]:
    """Return from which of dstrat's modules a file imports."""
    imports = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
    named = {node.module or "" for node in imports if isinstance(node, ast.ImportFrom)}
    return {name for name in named if name.partition(".")[0] == "dstrat"}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_uses_public_names_only(tmp_path, kind):
    run_new(tmp_path / "acme-mine", "--kind", kind)
    imported = set().union(*map(imported_modules, (tmp_path / "acme-mine").rglob("*.py")))
    assert {"dstrat", "dstrat.testing"} <= imported <= PUBLIC


OWN_LINES = 40
"""What a strategy that only changes the synchronisation of gradients may take, with its conformance tests."""


def code_lines(path: Path) -> int:
    """Return how many lines of a file are not empty."""
    return sum(bool(line.strip()) for line in path.read_text(encoding="utf-8").splitlines())


def test_a_strategy_with_its_conformance_tests_is_short(tmp_path):
    run_new(tmp_path / "dstrat-ring")
    own = [
        tmp_path / "dstrat-ring" / name
        for name in ("src/dstrat_ring/strategy.py", "src/dstrat_ring/plugin.py", "tests/test_strategy.py")
    ]
    assert sum(map(code_lines, own)) < OWN_LINES, {path.name: code_lines(path) for path in own}


@pytest.fixture
def generated(tmp_path) -> Path:
    """A folder with a package of each kind."""
    for kind in KINDS:
        run_new(tmp_path / f"acme-{kind}", "--kind", kind)
    return tmp_path


def call(command, **options):
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=400, check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def installed(generated, monkeypatch):
    """The folder of the packages, which this process sees as installed."""
    packages = [generated / f"acme-{kind}" for kind in KINDS]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    call([*pip, "--no-compile", "--target", generated / "site", *packages], cwd=generated)
    monkeypatch.syspath_prepend(str(generated / "site"))
    refresh_catalog()
    yield generated
    monkeypatch.undo()
    refresh_catalog()


class Outcomes:
    """A plugin of pytest that keeps how tests ended."""

    def __init__(self):
        self.passed, self.failed = [], []

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.failed.append(report.longreprtext)
        elif report.passed and report.when == "call":
            self.passed.append(report.nodeid)


@pytest.mark.usefixtures("quick_collections")
def test_the_tests_of_each_kind_pass_at_once(installed):
    # Here, where ranks need not import torch. Four of them show little that two do not; and that processes start as
    # they do for users is shown by the strategies of which these are subclasses.
    options = ["-k", "not [4 and not start_as_they_do_for_users", "--import-mode=importlib"]
    options += ["-p", "no:terminal", "-p", "no:cacheprovider"]
    for kind in KINDS:
        package, outcomes = installed / f"acme-{kind}", Outcomes()
        code = pytest.main(
            [*options, f"--rootdir={package}", "-c", str(package / "pyproject.toml"), str(package)], [outcomes]
        )
        assert outcomes.failed == [], kind
        assert outcomes.passed, kind
        assert code == 0, kind


@pytest.mark.variant
def test_what_is_written_satisfies_ruff_and_strict_mypy(generated):
    for kind in KINDS:
        ruff = [sys.executable, "-m", "ruff"]
        call([*ruff, "check", "--no-cache"], cwd=generated / f"acme-{kind}")
        call([*ruff, "format", "--check", "--no-cache"], cwd=generated / f"acme-{kind}")
    sources = [generated / f"acme-{kind}" / "src" for kind in KINDS]
    tests = [generated / f"acme-{kind}" / "tests" for kind in KINDS]
    # Strict by the workspace's settings and with its cache, which knows torch already.
    environ = {**os.environ, "MYPYPATH": os.pathsep.join(map(str, sources))}
    call([sys.executable, "-m", "mypy", *sources, *tests], cwd=WORKSPACE, env=environ)
