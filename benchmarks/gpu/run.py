"""Test and measure on a GPU, and write one page, in under nine minutes.

For example::

    python3 benchmarks/gpu/run.py --out report
    python3 benchmarks/gpu/run.py --out report --wheels folder-of-wheels

It needs a checkout and a Python with torch, and installs nothing into it: dstrat's packages and their entry points are
found in the checkout, and what they require and this Python lacks is put into the report's folder, from the folder of
wheels or by pip. Each part has its own time limit. Where torch sees no GPU, or with ``--dry-run``, it does what needs
none, with tiny networks, on simulated GPUs where there is a C++ compiler and on the CPU; the page says so. Wheels worth
having are those of deepspeed, torchao, lightning, accelerate.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import importlib.metadata
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
LIMIT = 520.0  # seconds for everything, which leaves some for the report
DRY_RUN_LIMIT = 300.0  # seconds for a part of a dry run
PYTEST = "pytest>=8.0"  # without it, the parts with tests are not run
PIP_SECONDS = 300.0  # for what is missing, before the time starts
CHECKS_AT_ONCE = 4  # on the one GPU
TAIL = 12  # lines of a failed part's output in the report


@dataclass(frozen=True, kw_only=True)
class Part:
    """One program of the report.

    Attributes:
        name: Its name, also of its files.
        command: Arguments of Python.
        seconds: Its time limit.
        needs_pytest: Whether it is made of tests.
        has_what_remains: Whether it is not counted among the nine minutes, and runs if others took less.
        checks: Whether it measures nothing, so that it may run beside others.
    """

    name: str
    command: list[str]
    seconds: float
    needs_pytest: bool = False
    has_what_remains: bool = False
    checks: bool = False


@dataclass(kw_only=True)
class Outcome:
    """How a part ended.

    Attributes:
        name: Of the part.
        state: ``"passed"``, ``"failed"``, ``"timed out"`` or ``"not run"``.
        seconds: How long it took.
        summary: Its last line of output, or why it was not run.
        figures: What it has measured.
        output: The end of its output, where it did not pass.
    """

    name: str
    state: str
    seconds: float = 0.0
    summary: str = ""
    figures: list[dict[str, Any]] = field(default_factory=list)
    output: str = ""


def main() -> int:
    """Run the parts, write the report, and return the exit code: 1 if a part did not pass."""
    options = read_options()
    if not is_installed("torch"):
        print_line(
            f"{sys.executable} has no torch: run this with a Python that has one for the GPU, such as that of your jobs"
        )
        return 2
    out: Path = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    environ = make_environment(out)
    missing = provide_requirements(out / "site", options.wheels, environ)
    if missing - {PYTEST}:
        print_line(
            f"{sys.executable} has no {', '.join(sorted(missing))}, and pip could not fetch it: put the wheels into a "
            "folder (pip download -d FOLDER ...) and name it with --wheels"
        )
        return 2
    started = time.monotonic()
    machine = describe_machine(environ)
    print_line(f"device {machine['device']}, torch {machine['torch']}, commit {machine['commit']}")
    dry_run = options.dry_run or machine["device"] == "none"
    if dry_run:
        machine["dry run"] = f"on {simulation()}, with tiny networks: its figures say nothing about a GPU"
        print_line(f"a dry run {machine['dry run']}")
        environ.setdefault("DSTRAT_SIMULATED_GPUS", "4")
    else:
        environ.setdefault("DS_ACCELERATOR", "cuda")  # DeepSpeed reads it when it is imported
    outcomes: list[Outcome] = []

    def run(part: Part) -> Outcome:
        remaining = (3 if dry_run else 1) * options.seconds - (time.monotonic() - started)
        if part.needs_pytest and PYTEST in missing:
            return Outcome(name=part.name, state="not run", summary="pytest is not installed")
        return run_part(part, out, environ, remaining)

    planned = [part for part in parts(out, dry_run=dry_run) if not options.only or part.name in options.only]
    at_once = 1 if dry_run else CHECKS_AT_ONCE
    for selected, limit in (([p for p in planned if p.checks], at_once), ([p for p in planned if not p.checks], 1)):
        with ThreadPoolExecutor(limit) as pool:
            for last in pool.map(run, selected):
                outcomes.append(last)
                print_line(f"{last.state:10} {last.seconds:6.1f} s  {last.name}: {last.summary}")
                write_report(out, machine, outcomes, dry_run=dry_run)  # after each part, in case this one is ended
    print_line(f"written to {out / 'report.md'}")
    return 0 if all(outcome.state == "passed" for outcome in outcomes) else 1


def read_options() -> argparse.Namespace:
    """Return what the command line says."""
    parser = argparse.ArgumentParser(description="Test and measure on a GPU, and write one report.")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "gpu", help="folder of the report")
    parser.add_argument("--wheels", type=Path, help="folder of wheels for what is not installed")
    parser.add_argument("--dry-run", action="store_true", help="do on the CPU what needs no GPU")
    parser.add_argument("--only", action="append", help="this part alone; may be repeated")
    parser.add_argument("--seconds", type=float, default=LIMIT, help="for everything; parts that remain are not run")
    return parser.parse_args()


def simulation() -> str:
    """Return the accelerator of a dry run: simulated GPUs where they can be compiled."""
    return "simulated_gpu" if shutil.which(os.environ.get("CXX", "c++")) else "cpu"


def parts(out: Path, *, dry_run: bool) -> list[Part]:
    """Return the parts: checks, then measurements, of which the most important ones come first."""
    device = simulation() if dry_run else "cuda"
    pytest = ["-m", "pytest", "-c", str(write_pytest_settings(out)), f"--rootdir={ROOT}", "-m", "cuda", "-q"]
    pytest += ["-p", "no:cacheprovider", "--continue-on-collection-errors"]  # one file must not cost all others
    tests = [*pytest, *files_with_cuda_tests(), *(["--collect-only"] if dry_run else [])]

    def checked(name: str, seconds: float, *, checks: bool = True) -> Part:
        command = [str(HERE / f"{name}.py"), "--device", device, "--out", str(out / f"{name}.json")]
        return Part(name=name, command=command, seconds=seconds, checks=checks)

    def measured(name: str, seconds: float, *, has_what_remains: bool = False) -> Part:
        size = ["--device", "cpu", "--tiny"] if dry_run else ["--device", "cuda"]
        within = ["--seconds", str(seconds / 2), "--out", str(out / f"{name}.json")]
        command = [str(HERE / "measure.py"), name, *size, *within]
        return Part(name=name, command=command, seconds=seconds, has_what_remains=has_what_remains)

    demo = [str(ROOT / "examples" / "gpt" / "train.py"), "--out", str(out / "demo")]
    on_device = ["--accelerator", "gpu", "--devices", "1", "--precision", "bf16-mixed", "--steps", "300"]
    kit = ["-m", "dstrat", "test", device if dry_run else "cuda", "--kind", "accelerator", "--tier", "device"]
    if dry_run:
        on_device = ["--accelerator", "cpu", "--devices", "1", "--steps", "2", "--width", "24", "--layers", "1"]
    planned = [
        checked("nccl", 128),  # the longest ones first
        checked("features", 100),
        Part(
            name="tests",
            command=[*tests, "-k", "not (deepspeed and offload)"],
            seconds=95,
            needs_pytest=True,
            checks=True,
        ),
        checked("hang", 90),
        checked("ranks", 60),
        checked("paths", 40),
        checked("waits", 35),
        Part(name="conformance", command=kit, seconds=20, needs_pytest=True, checks=True),
        Part(name="demo", command=[*demo, *on_device], seconds=20, checks=True),
        measured("gpt", 60),
        measured("strategies", 75),
        measured("mlp", 30),
        measured("checkpoints", 30),
        checked("saves", 45, checks=False),
        *([] if dry_run else [measured("gpt-compiled", 90, has_what_remains=True)]),
        measured("low-precision", 50, has_what_remains=True),
        # DeepSpeed compiles for it, which takes minutes where it has not done so before.
        Part(
            name="deepspeed-offload",
            command=[*tests, "-k", "deepspeed and offload"],
            seconds=150,
            needs_pytest=True,
            has_what_remains=True,
        ),
    ]
    if not dry_run:
        return planned
    # It takes minutes on two cores; a limit is for what hangs, and a CPU may be busy with other programs.
    compiled = [
        Part(name="simulated-gpu", command=["-m", "dstrat.testing.simulated_gpu.extension"], seconds=0, checks=True)
    ]
    first = compiled if device == "simulated_gpu" else []
    return [replace(part, seconds=DRY_RUN_LIMIT) for part in [*first, *planned]]


def run_part(part: Part, out: Path, environ: dict[str, str], remaining: float) -> Outcome:
    """Run a part within its limit, and end everything that it has started."""
    limit = min(part.seconds, remaining)
    if limit <= 0:
        return Outcome(name=part.name, state="not run", summary="the time for everything was over")
    log, figures = out / f"{part.name}.log", out / f"{part.name}.json"
    figures.unlink(missing_ok=True)  # of an earlier report
    started = time.monotonic()
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, *part.command],
            cwd=ROOT,
            env=environ,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that its ranks end with it
        )
        try:
            state = "passed" if process.wait(limit) == 0 else "failed"
        except subprocess.TimeoutExpired:
            state = "timed out"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    measured = json.loads(figures.read_text(encoding="utf-8")) if figures.exists() else []
    return Outcome(
        name=part.name,
        state=state,
        seconds=round(time.monotonic() - started, 1),
        summary=f"{len(measured)} figures" if measured else last_text(lines),
        figures=measured,
        output="" if state == "passed" else "\n".join(lines[-TAIL:]),
    )


def last_text(lines: list[str]) -> str:
    """Return the last line that is text: a network that has hardly trained prints bytes."""
    return next((line.strip("= ") for line in reversed(lines) if line.isascii() and line.isprintable()), "")


# The environment


def make_environment(out: Path) -> dict[str, str]:
    """Return the variables under which the parts find dstrat's packages, and what is put into the report's folder."""
    site = out / "site"
    site.mkdir(exist_ok=True)
    paths = [str(site)]
    for project in sorted(ROOT.glob("packages/*/pyproject.toml")):
        settings = read_toml(project)["project"]
        if not is_installed(settings["name"]):
            write_metadata(site, settings)
            paths.append(str(project.parent / "src"))
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    before = [inherited["PYTHONPATH"]] if inherited.get("PYTHONPATH") else []
    return {
        **inherited,
        "PYTHONPATH": os.pathsep.join([*paths, *before]),
        "PYTHONUNBUFFERED": "1",
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # or counting devices would keep tests from forking
        "TORCHINDUCTOR_CACHE_DIR": str(out / "inductor"),
    }


def provide_requirements(site: Path, wheels: Path | None, environ: dict[str, str]) -> set[str]:
    """Put what dstrat requires and this Python lacks into a folder; return the requirements that are still missing."""
    install = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--upgrade", "--target", str(site)]
    given = sorted(wheels.glob("*.whl")) if wheels else []
    if new := [wheel for wheel in given if not is_installed(wheel.name.split("-")[0])]:
        subprocess.run([sys.executable, *install, "--no-index", "--no-deps", *map(str, new)], check=True)
    required = read_toml(ROOT / "packages" / "core" / "pyproject.toml")["project"]["dependencies"]
    wanted = [text for text in required if not text.startswith("torch>")] + [PYTEST]
    missing = missing_requirements(wanted, environ)
    if missing:
        print_line(f"pip puts what is missing into {site}: {', '.join(sorted(missing))}")
        with contextlib.suppress(subprocess.SubprocessError):
            subprocess.run([sys.executable, *install, *sorted(missing)], check=True, timeout=PIP_SECONDS)
    return missing_requirements(wanted, environ) if missing else missing


def missing_requirements(wanted: list[str], environ: dict[str, str]) -> set[str]:
    """Return the requirements whose module cannot be imported in the environment of the parts."""
    modules = {text: re.split("[<>=]", text)[0] for text in wanted}
    code = "import importlib.util as u, sys; print(*(name for name in sys.argv[1:] if u.find_spec(name) is None))"
    command = [sys.executable, "-c", code, *modules.values()]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    return {text for text, module in modules.items() if module in done.stdout.split()}


def is_installed(distribution: str) -> bool:
    """Return whether this Python has a distribution."""
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def write_metadata(site: Path, project: dict[str, Any]) -> None:
    """Write what an installation would: name, version, requirements and entry points, by which plugins are found."""
    folder = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    folder.mkdir(exist_ok=True)
    requirements = [f"Requires-Dist: {text}" for text in project.get("dependencies", ())]
    head = ["Metadata-Version: 2.1", f"Name: {project['name']}", f"Version: {project['version']}"]
    (folder / "METADATA").write_text("\n".join([*head, *requirements]) + "\n", encoding="utf-8")
    groups = {**project.get("entry-points", {}), "console_scripts": project.get("scripts", {})}
    lines = [
        line
        for group, points in groups.items()
        if points
        for line in (f"[{group}]", *(f"{name} = {value}" for name, value in points.items()), "")
    ]
    (folder / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")


def read_toml(path: Path) -> dict[str, Any]:
    """Return the content of a TOML file; Python 3.10 has no module for it, and pip brings one."""
    try:
        import tomllib
    except ImportError:
        from pip._vendor import tomli as tomllib  # type: ignore[no-redef]
    return tomllib.loads(path.read_text(encoding="utf-8"))


def write_pytest_settings(out: Path) -> Path:
    """Write the settings of the tests without those of plugins that need not be installed; return the file."""
    settings = read_toml(ROOT / "pyproject.toml")["tool"]["pytest"]["ini_options"]
    settings = {**settings, "pythonpath": [str(ROOT)], "addopts": "--strict-markers --import-mode=importlib -ra"}
    for name in ("timeout", "testpaths"):
        settings.pop(name, None)
    settings["markers"] = [*settings["markers"], "timeout: of pytest-timeout, which need not be installed"]
    lines = ["[pytest]"]
    for name, value in settings.items():
        values = value if isinstance(value, list) else [str(value)]
        lines += [f"{name} ="] + [f"    {text}" for text in values]
    path = out / "pytest.ini"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def files_with_cuda_tests() -> list[str]:
    """Return the test files that have a test marked cuda."""
    files = sorted([*ROOT.glob("packages/*/tests/**/test_*.py"), *ROOT.glob("tests/test_*.py")])
    return [str(path) for path in files if re.search(r"mark\.cuda\b", path.read_text(encoding="utf-8"))]


# The report


def describe_machine(environ: dict[str, str]) -> dict[str, str]:
    """Return device, driver, versions and commit."""
    code = (
        "import json, torch; c = torch.cuda; has = c.is_available(); print(json.dumps({'torch': torch.__version__, "
        "'cuda': str(torch.version.cuda), 'device': c.get_device_name(0) if has else 'none', "
        "'memory': f'{c.get_device_properties(0).total_memory / 2**30:.1f} GiB' if has else ''}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True, timeout=120
    )
    described: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    query = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return {
        **described,
        "driver": first_line_of(*query),
        "python": platform.python_version(),
        "system": platform.platform(),
        "commit": first_line_of("git", "-C", str(ROOT), "rev-parse", "HEAD"),
        "at": dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds"),
    }


def first_line_of(*command: str) -> str:
    """Return the first line that a program prints; "unknown" where it cannot be run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.partition("\n")[0].strip() or "unknown"


def write_report(out: Path, machine: dict[str, str], outcomes: list[Outcome], *, dry_run: bool) -> None:
    """Write ``report.json`` and ``report.md``."""
    content = {"dry_run": dry_run, "machine": machine, "parts": [asdict(outcome) for outcome in outcomes]}
    (out / "report.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    lines = ["# Report of a dry run" if dry_run else "# Report of a GPU", ""]
    lines += [f"- {name}: {value}" for name, value in machine.items() if value]
    lines += ["", "| part | state | seconds | |", "|---|---|--:|---|"]
    lines += [f"| {one.name} | {one.state} | {one.seconds} | {cell(one.summary)} |" for one in outcomes]
    figures = [figure for outcome in outcomes for figure in outcome.figures]
    checks = [figure for figure in figures if figure["unit"] == "failures"]
    lines += ["", "| check | state | |", "|---|---|---|"]
    lines += [f"| {one['name']} | {state_of(one)} | {cell(one['note'])} |" for one in checks]
    lines += ["", "| figure | measured | goal | met | |", "|---|--:|--:|---|---|"]
    lines += [figure_row(figure) for figure in figures if figure["unit"] != "failures"]
    stacks = dict.fromkeys(stack for figure in figures for stack in figure.get("stacks", ()))
    for number, stack in enumerate(stacks, 1):
        lines += ["", f"## Wait {number} of {len(stacks)} for the device", "", "```", stack, "```"]
    for outcome in outcomes:
        if outcome.output:
            lines += ["", f"## {outcome.name}: {outcome.state}", "", "```", outcome.output, "```"]
    (out / "report.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def state_of(check: dict[str, Any]) -> str:
    """Return the state of a check, whose value is its number of failures."""
    if check["value"]:
        return "failed"
    return "not run" if check["note"].startswith("not run") else "passed"


def figure_row(figure: dict[str, Any]) -> str:
    """Return the row of a figure; a goal is a largest value."""
    goal = figure["goal"]
    met = "" if goal is None else "yes" if figure["value"] <= goal else "no"
    bound = "" if goal is None else f"at most {goal:g}"
    return f"| {figure['name']} | {figure['value']:.4g} {figure['unit']} | {bound} | {met} | {cell(figure['note'])} |"


def cell(text: str) -> str:
    """Return a text that fits into a cell of a table."""
    return text.replace("|", "/").replace("\n", " ")


def print_line(text: str) -> None:
    """Print a line at once."""
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
