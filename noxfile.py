"""The sessions of the workspace: checks, tests and programs.

``python3 noxfile.py`` needs nothing but Python: it makes itself a small private environment with nox and goes on in
it, with the same arguments. ``nox`` does the same where it is installed. All environments are in ``.nox``.
"""

import hashlib
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

if sys.version_info < (3, 10):  # noqa: UP036 - the file is what an older Python is given first
    sys.exit(
        "dstrat needs Python 3.10 or newer, and {} is Python {}.{}: "
        "run noxfile.py with a newer one, such as python3.12 noxfile.py".format(sys.executable, *sys.version_info)
    )

ROOT = Path(__file__).resolve().parent
NOX = "nox>=2025.5.1,<2027"
PIP = "pip>=25.1"  # several times as fast as the one that Python 3.10 or 3.11 brings
SECONDS_BETWEEN_LINES = 5.0  # of progress
MAKING: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)  # of each environment: the session waits for it


def bootstrap() -> Path:
    """Return the programs of the environment that has nox, and the pip that fills all others."""
    return environment("bootstrap", ("--upgrade", NOX, PIP))


def environment(
    name: str,
    *steps: tuple[str, ...],
    pip: Path | None = None,
    inputs: tuple[Path, ...] = (),
    first_import: str = "",
    after_first: Path | None = None,
) -> Path:
    """Make a private environment, unless it is there, complete, and made from the same things.

    Args:
        name: Its folder in ``.nox``.
        steps: Arguments of ``pip install``, once for each step.
        pip: The program that fills it; None gives the environment one of its own.
        inputs: Files that the steps refer to; a change of their text makes the environment anew.
        first_import: Modules to import once, which compiles what they import; pip would compile everything.
        after_first: A program that its Python runs between the first step and the others.

    Returns:
        The folder of its programs.
    """
    folder = ROOT / ".nox" / name
    programs = folder / "bin"
    stamp = folder / "made-from"
    texts = (path.read_text(encoding="utf-8") for path in (*inputs, *([after_first] if after_first else [])))
    wanted = "\n".join([sys.version, str(ROOT), *(argument for step in steps for argument in step), *texts])
    with MAKING[name]:
        if not ((programs / "python").exists() and stamp.exists() and stamp.read_text(encoding="utf-8") == wanted):
            make_environment(folder, *steps, pip=pip, after_first=after_first)
            if first_import:
                print(f"{folder.relative_to(ROOT)}: compiling what programs import first", flush=True)
                subprocess.run([programs / "python", "-c", f"import {first_import}"], cwd=folder, check=True)
            stamp.write_text(wanted, encoding="utf-8")  # last, so that an interrupted environment is made again
    return programs


def make_environment(
    folder: Path, *steps: tuple[str, ...], pip: Path | None = None, after_first: Path | None = None
) -> None:
    """Make an environment in place of what is in the folder, or end with a message that says what is missing."""
    name, began = folder.relative_to(ROOT), time.monotonic()
    print("making the environment", name, flush=True)
    if importlib.util.find_spec("ensurepip") is None or importlib.util.find_spec("venv") is None:
        sys.exit(
            f"{sys.executable} cannot make environments: its modules venv and ensurepip are not installed. "
            "On Debian and Ubuntu: apt install python3-venv"
        )
    venv = [sys.executable, "-I", "-m", "venv", "--clear", *(["--without-pip"] if pip else [])]
    if subprocess.run([*venv, folder], check=False).returncode != 0:
        sys.exit(f"{sys.executable} could not make an environment in {folder}: see the lines above")
    filled_by = [pip, "--python", folder] if pip else [folder / "bin" / "python", "-m", "pip"]
    install = [*filled_by, "install", "--disable-pip-version-check", "--no-compile", "--progress-bar=off"]
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # pip would take it for there
    for number, step in enumerate(steps):
        if number == 1 and after_first is not None:
            subprocess.run([folder / "bin" / "python", after_first], check=True)
        with subprocess.Popen([*install, *step], cwd=ROOT, env=environ, stdout=subprocess.PIPE, text=True) as process:
            show_progress(process, folder, began)
        if process.returncode != 0:
            sys.exit(
                f"pip could not fill the environment {folder}: see the lines above. It needs a package index: check "
                "the network, or name a mirror to pip (PIP_INDEX_URL=https://...)"
            )
    print(f"{name}: {distributions_in(folder)} distributions after {time.monotonic() - began:.0f} s", flush=True)


def show_progress(pip: "subprocess.Popen[str]", folder: Path, began: float) -> None:
    """Wait for pip, and print what it does, now and then: it has hundreds of lines itself, or none for minutes."""
    latest = ["starting pip"]

    def read() -> None:
        for line in pip.stdout or ():
            verb, _, rest = line.strip().partition(" ")
            if verb == "Installing" and ":" in rest:  # "collected packages: ..."
                expected = distributions_in(folder) + rest.count(",") + 1
                latest.append(f"installing {{}} of {expected} distributions")
            elif verb in {"Collecting", "Downloading", "Building"}:
                latest.append(f"{verb.lower()} {rest.partition(' (from ')[0]}")

    reader = threading.Thread(target=read)
    reader.start()
    while reader.is_alive():
        reader.join(SECONDS_BETWEEN_LINES)
        if reader.is_alive():
            text = latest[-1].replace("{}", str(distributions_in(folder)))
            print(f"{folder.relative_to(ROOT)}: {time.monotonic() - began:.0f} s, {text}", flush=True)


def distributions_in(folder: Path) -> int:
    """Return the number of distributions that are installed in an environment."""
    return sum(1 for _ in folder.glob("lib/python*/site-packages/*.dist-info"))


if __name__ == "__main__":
    private_nox = bootstrap() / "nox"
    os.execv(private_nox, [private_nox, "--noxfile", ROOT / "noxfile.py", *sys.argv[1:]])  # does not return

import nox  # noqa: E402 - not there before the lines above

nox.options.default_venv_backend = "none"
FIRST = ("lint", "types", "layers", "tests")  # in one environment
nox.options.sessions = FIRST
# What CI runs in other environments.
REST = ("environments", "wheels", "complete", "neighbours", "third_party", "hpu", "simulated_gpu", "xla")

PACKAGES = sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml"))
CONSTRAINTS = ROOT / "constraints.txt"
ADAPTERS = ("lightning", "ray", "transformers")  # packages for other libraries, which are in the session neighbours
BESIDE_OTHERS = (ROOT / "tests" / "neighbours", *(ROOT / "packages" / name / "tests" for name in ADAPTERS))
ON_SIMULATED_GPUS = ROOT / "tests" / "simulated_gpu"
# On simulated GPUs on request
SUITES = (
    "core/tests/checkpoint",
    "core/tests/own_loop",
    "core/tests/training",
    "ddp/tests",
    "fsdp/tests",
    "mesh/tests",
)
ACCELERATOR = "DSTRAT_TEST_ACCELERATOR"  # of the tests of trainings, by its alias
DEFAULT = "not variant and not neighbours and not (builds and slow) and not (clusters and slow)"
COMPILED = "dstrat_fsdp.strategy, torch._dynamo"  # by one import; pip would compile everything
PASSED = "DSTRAT_TEST_PASSED"  # a file with the tests that have passed in the session tests: others leave them out
WHEELS = "DSTRAT_TEST_WHEELS"  # the folder of the environment that is made from the wheels
NEWER_TORCH = "DSTRAT_TEST_NEWER_TORCH"  # a Python with all families and the torch of the other sessions
SIMULATOR_OF_HPU = "DSTRAT_TEST_HPU_SIMULATOR"  # its folder, for tests that only show it to some of their processes
BUILD_TOOLS = (PIP, "editables", "hatchling>=1.26,<2", "setuptools", "wheel")  # or each build has its own environment
FAIRSCALE = ROOT / "packages" / "fairscale"  # installed after torch, which the build of FairScale imports
ON_LIBRARIES = ("deepspeed", "fairscale", "hivemind", "ray", "torchft")  # many distributions, which few tests need
TWINE = "twine>=6.1,<7"  # the first that publishes from a trusted workflow without a token
WORKFLOW_LINTERS = ("check-jsonschema>=0.33,<1", "zizmor>=1.5,<2")
OLDEST_TORCH = "torch==2.9.*"  # the floor in the packages' requirements
DIST = ROOT / ".nox" / "dist"
HPU = ROOT / "packages" / "hpu"
SIMULATED: set[Path] = set()  # programs for whose torch this run has compiled the simulator of Gaudi
XLA = ROOT / "packages" / "xla"
TORCH_XLA = (  # the torch that it needs, and what of CUDA that loads even on the CPU
    "torch==2.9.0",
    "torch_xla==2.9.0",
    "nvidia-cuda-cupti-cu12==12.8.90",
    "nvidia-cuda-runtime-cu12==12.8.90",
    "nvidia-cufile-cu12==1.13.1.3",
)
THIRD_PARTY: dict[str, tuple[tuple[str, ...], ...]] = {
    # The folder of a package, and what pip installs for its tests: the arguments of one or several commands.
    "colossalai": (  # without what it asks for: an old torch, and fixed versions that it runs without
        ("--no-deps", "colossalai>=0.5,<0.6", "galore_torch>=1.0"),
        ("peft", "bitsandbytes", "transformers", "einops", "psutil", "rich", "click", "safetensors", "ninja"),
    ),
    "horovod": (("cloudpickle", "psutil", "pyyaml", "packaging"),),  # Horovod itself is built
}
MOVED_TO = ("core", "ddp", "fsdp", "hpu", "ipu")  # in the same environment: strategies that take over checkpoints
CORE_ON_OLDER_TORCH = ("interfaces", "parallel")  # of the core's tests, those that use most of torch


def lean_environment() -> Path:
    """Return the programs of the environment that has all packages, and the libraries that most of the tests need.

    Tests of others are skipped in it.
    """
    light = [path for path in editable_packages() if Path(path).name not in ON_LIBRARIES]
    others = [f"--editable={(ROOT / 'packages' / name).relative_to(ROOT)}" for name in ON_LIBRARIES]
    return environment(
        "tests",
        BUILD_TOOLS,
        ("--no-build-isolation", "--constraint=constraints.txt", *light, *dependency_group("tests")),
        ("--no-build-isolation", "--no-deps", *others),
        pip=bootstrap() / "pip",
        inputs=(CONSTRAINTS, *(package / "pyproject.toml" for package in PACKAGES)),
        first_import=f"{COMPILED}, pytest",
    )


def demo_environment() -> Path:
    """Return the programs of the environment that has what the demo trains, draws and logs with."""
    packages = [ROOT / "packages" / name for name in ("core", "ddp", "fsdp")]
    editable = [f"--editable={package.relative_to(ROOT)}" for package in packages]
    return environment(
        "demo",
        ("editables", "hatchling>=1.26,<2"),
        ("--no-build-isolation", "--constraint=constraints.txt", *editable, *dependency_group("demo")),
        pip=bootstrap() / "pip",
        inputs=(CONSTRAINTS, *(package / "pyproject.toml" for package in packages)),
        first_import=f"{COMPILED}, matplotlib.pyplot, tensorboard",
    )


def dependency_group(name: str) -> tuple[str, ...]:
    """Return the requirements of a group in pyproject.toml."""
    return tuple(nox.project.dependency_groups(nox.project.load_toml(ROOT / "pyproject.toml"), name))


def workspace(name: str = "shared", *more: str, constraints: Path | None = CONSTRAINTS) -> Path:
    """Return the programs of the environment that has all packages, installed editable, and the tools."""
    tools = dependency_group("dev")
    editable = editable_packages()
    constrained = [constraints] if constraints else []
    inputs = (*constrained, *(package / "pyproject.toml" for package in PACKAGES))
    beside = ("--no-build-isolation", *(f"--constraint={path.relative_to(ROOT)}" for path in constrained))
    steps = (BUILD_TOOLS, (*beside, *editable, *tools, *more), (*beside, f"--editable={FAIRSCALE.relative_to(ROOT)}"))
    return environment(name, *steps, pip=bootstrap() / "pip", inputs=inputs, first_import=f"{COMPILED}, pytest")


def editable_packages() -> list[str]:
    """Return pip's options for all packages but FairScale's, installed editable."""
    return [f"--editable={package.relative_to(ROOT)}" for package in PACKAGES if package != FAIRSCALE]


def neighbours_environment() -> Path:
    """Return the programs of the environment that has what users install beside dstrat."""
    requirements = dependency_group("neighbours")
    strategies = ("ddp", "deepspeed", "diloco", "fsdp", "mesh")
    tested = [package for package in PACKAGES if package.name in ("core", *strategies, *ADAPTERS)]
    editable = [f"--editable={package.relative_to(ROOT)}" for package in tested]
    beside = ("--no-build-isolation", "--constraint=constraints.txt", *editable, *requirements)
    inputs = (CONSTRAINTS, ROOT / "pyproject.toml", *(package / "pyproject.toml" for package in tested))
    compiled = (
        f"{COMPILED}, datasets, hydra, lightning.pytorch, peft, pytest, pytorch_lightning, ray.tune, transformers"
    )
    return environment("neighbours", BUILD_TOOLS, beside, pip=bootstrap() / "pip", inputs=inputs, first_import=compiled)


def third_party_environment() -> Path:
    """Return the programs of the environment that has the libraries of other strategies, but those that are built."""
    tools = dependency_group("third-party")
    families = [ROOT / "packages" / name for name in THIRD_PARTY]
    installed = [*(ROOT / "packages" / name for name in MOVED_TO), *families]
    editable = [f"--editable={package.relative_to(ROOT)}" for package in installed]
    return environment(
        "third-party",
        (*BUILD_TOOLS, "setuptools<81"),  # the last with pkg_resources, which such libraries import
        ("--no-build-isolation", "--constraint=constraints.txt", *editable, *tools),
        *(("--no-build-isolation", *step) for steps in THIRD_PARTY.values() for step in steps),
        pip=bootstrap() / "pip",
        inputs=(CONSTRAINTS, ROOT / "pyproject.toml", *(package / "pyproject.toml" for package in installed)),
        first_import=f"{COMPILED}, dstrat_colossalai.strategy, pytest",
    )


def xla_environment() -> Path:
    """Return the programs of the environment that has torch_xla, and the older torch that it needs."""
    tools = dependency_group("dev")
    inputs = tuple(package / "pyproject.toml" for package in PACKAGES)
    editable = editable_packages()
    return environment(
        "xla",
        ("--no-deps", *TORCH_XLA),
        BUILD_TOOLS,
        ("--no-build-isolation", *editable, *tools, *TORCH_XLA[:2]),
        pip=bootstrap() / "pip",
        inputs=inputs,
        first_import="torch_xla, torch._dynamo, pytest",
        after_first=XLA / "tests" / "torch_without_cuda.py",
    )


def run(session: nox.Session, programs: Path, program: str, *arguments: str, **env: str) -> None:
    """Run a program of an environment, with the environment's other programs on its path."""
    path = os.pathsep.join([str(programs), os.environ["PATH"]])
    # Modules from elsewhere would hide what is installed; without compiled files each import takes far longer.
    unset = dict.fromkeys(["PYTHONPATH", "PYTHONDONTWRITEBYTECODE"])
    session.run(str(programs / program), *arguments, env={**unset, "PATH": path, **env})


@nox.session
def environments(session: nox.Session) -> None:
    """Make the environment that most sessions use, and begin with the others beside it and the next sessions.

    pip and the checks use one core each.  A session waits for its environment, and makes it where this has failed.
    """
    others = (neighbours_environment, compile_tests, third_party_environment, xla_environment)
    threading.Thread(target=lambda: [make() for make in others]).start()
    session.log(f"made {workspace().parent.relative_to(ROOT)}")


def compile_tests() -> None:
    """Collect all tests once, which compiles them for the processes of pytest that do so side by side."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    collect = [workspace() / "pytest", "--collect-only", "--quiet"]
    subprocess.run(collect, cwd=ROOT, env=environ, stdout=subprocess.DEVNULL, check=False)


@nox.session
def lint(session: nox.Session) -> None:
    """Ruff's rules and its format."""
    run(session, lean_environment(), "ruff", "check", ".")
    run(session, lean_environment(), "ruff", "format", "--check", ".")


@nox.session
def types(session: nox.Session) -> None:
    """The types of all packages, with mypy."""
    run(session, lean_environment(), "mypy")


@nox.session
def layers(session: nox.Session) -> None:
    """Who may import whom, with import-linter."""
    run(session, lean_environment(), "lint-imports", "--no-logo")


@nox.session
def workflows(session: nox.Session) -> None:
    """The workflows in .github, by GitHub's schema and with zizmor's checks of what they may do."""
    programs = environment("workflows", WORKFLOW_LINTERS, pip=bootstrap() / "pip")
    files = sorted(str(path.relative_to(ROOT)) for path in (ROOT / ".github" / "workflows").glob("*.yml"))
    run(session, programs, "check-jsonschema", "--builtin-schema", "vendor.github-workflows", *files)
    run(session, programs, "zizmor", "--offline", "--no-progress", *files)


@nox.session
def tests(session: nox.Session) -> None:
    """Most tests of all packages, in several processes; or with arguments after --, which go to pytest, in one.

    The session ``complete`` runs the slow ones, and those of libraries that this environment does not have.
    ``-- -m variant`` runs those of further aliases.
    """
    passed = Path(os.environ.setdefault(PASSED, str(ROOT / ".nox" / "passed")))  # for sessions in the same run of nox
    passed.unlink(missing_ok=True)
    options = ("-m", f"{DEFAULT} and not wheels and not slow", f"--record-passed={passed}")
    run(session, lean_environment(), "pytest", *options, *(session.posargs or workers()), OMP_NUM_THREADS="1")


@nox.session
def complete(session: nox.Session) -> None:
    """The tests beside all libraries, but for those that have passed in the session tests of the same run of nox.

    Arguments after -- go to pytest.  Tests marked ``builds`` run where that session has been before, and those marked
    ``wheels`` where that one has just been: ``-s wheels complete``.
    """
    marked = DEFAULT if WHEELS in os.environ else f"{DEFAULT} and not wheels"
    options = ["-m", marked, *([f"--leave-out={os.environ[PASSED]}"] if PASSED in os.environ else [])]
    one_thread = {"OMP_NUM_THREADS": "1"}  # in each process, of which there are several for each core
    run(session, workspace(), "pytest", *options, *(session.posargs or workers()), **one_thread)


@nox.session
def variants(session: nox.Session) -> None:
    """The tests that no other session runs: costly ones that show for a variant what others show (an hour).

    Arguments after -- go to pytest.
    """
    run(session, workspace(), "pytest", "-m", "variant", *(session.posargs or workers()), OMP_NUM_THREADS="1")
    arguments = pytest_arguments(session, *BESIDE_OTHERS, by_default=workers("loadgroup", more=1))
    run_beside_others(session, "-m", "variant and not (clusters and slow)", *arguments)
    # The first line has skipped those on simulated GPUs, which a process has if it is told so when it starts.
    arguments = pytest_arguments(session, ON_SIMULATED_GPUS, by_default=workers(more=1))
    run_on_simulated_gpus(session, "-m", "variant", *arguments)


@nox.session(name="all")
def everything(session: nox.Session) -> None:
    """What CI runs: the sessions that run without arguments, then those in other environments."""
    for name in (*FIRST, *REST):
        session.notify(name)


@nox.session
def rest(session: nox.Session) -> None:
    """What CI runs after the sessions that run without arguments."""
    for name in REST:
        session.notify(name)


@nox.session
def newest(session: nox.Session) -> None:
    """The tests with the newest torch that pip resolves (gigabytes), or with arguments after --, which go to pytest.

    ``.nox/newest`` stays as it is until it is removed: remove it for a torch that has come out since.
    """
    programs = workspace("newest", constraints=None)
    run(session, programs, "python", "-c", "import torch; print('torch', torch.__version__)")
    marked = f"{DEFAULT} and not wheels"
    run(session, programs, "pytest", "-m", marked, *(session.posargs or workers()), OMP_NUM_THREADS="1")


@nox.session
def oldest(session: nox.Session) -> None:
    """The tests with the oldest torch that the packages support, or with arguments after --, which go to pytest."""
    programs = workspace("oldest", OLDEST_TORCH, constraints=None)
    run(session, programs, "python", "-c", "import torch; print('torch', torch.__version__)")
    marked = f"{DEFAULT} and not wheels"
    run(session, programs, "pytest", "-m", marked, *(session.posargs or workers()), OMP_NUM_THREADS="1")


@nox.session
def xla(session: nox.Session) -> None:
    """Tests of dstrat-xla on XLA's CPU backend, and some of the core's, with the older torch that torch_xla needs.

    ``-- all`` runs the tests of core, ddp and fsdp as well (half an hour); other arguments go to pytest.
    """
    programs = xla_environment()
    run_all = session.posargs == ["all"]
    core = [ROOT / "packages" / "core" / "tests" / name for name in CORE_ON_OLDER_TORCH]
    others = [ROOT / "packages" / name / "tests" for name in ("core", "ddp", "fsdp")] if run_all else core
    environ = {"OMP_NUM_THREADS": "1", "PJRT_DEVICE": "CPU", NEWER_TORCH: str(workspace() / "python")}
    environ[SIMULATOR_OF_HPU] = simulator_of_hpu(session, workspace())
    environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0"  # compiling takes longer than running what the tests do
    marked = ("-m", f"{DEFAULT} and not wheels")
    if session.posargs and not run_all:
        run(session, programs, "pytest", *marked, *pytest_arguments(session, XLA / "tests", by_default=()), **environ)
        return
    run(session, programs, "pytest", *marked, *workers(more=1), str(XLA / "tests"), **environ)
    # In processes of their own: after a backward pass on the CPU, torch knows no gradients of XLA's devices.
    run(session, programs, "pytest", *marked, *workers(more=2 if run_all else 0), *map(str, others), **environ)


@nox.session
def hpu(session: nox.Session) -> None:
    """Tests of dstrat-hpu on a simulator of Gaudi, which is compiled once for each torch (a minute).

    It is kept in ``~/.cache/dstrat``, or the folder that ``DSTRAT_TEST_EXTENSIONS`` names.  Other arguments go to
    pytest.  Other sessions do not see the simulator, beside which ``accelerator="auto"`` would be Gaudi.
    """
    programs = workspace()
    environ = {"OMP_NUM_THREADS": "1", "PYTHONPATH": simulator_of_hpu(session, programs)}
    marked = ("-m", f"{DEFAULT} and not wheels")
    arguments = pytest_arguments(session, HPU / "tests", by_default=workers(more=1))
    run(session, programs, "pytest", *marked, *arguments, **environ)


@nox.session
def simulated_gpu(session: nox.Session) -> None:
    """Tests on simulated GPUs, whose C++ part is compiled once for each torch (a minute); it needs a compiler.

    It is kept in ``~/.cache/dstrat``, or the folder that ``DSTRAT_TEST_EXTENSIONS`` names.  Other arguments go to
    pytest.  Other sessions have no such device: torch has one type of device beside the CPU in a process.

    ``-- --suites`` runs on them what other sessions run on the CPU: the tests of the Trainer, of hand-written loops, of
    checkpoints and of the packages ddp, fsdp and mesh.
    """
    if "--suites" in session.posargs:
        arguments = [argument for argument in session.posargs if argument != "--suites"] or workers(more=1)
        testpaths = shlex.join(f"packages/{suite}" for suite in SUITES)
        options = ("-m", DEFAULT, f"--override-ini=testpaths={testpaths}", *arguments)
        run_on_simulated_gpus(session, *options, **{ACCELERATOR: "simulated_gpu"})
        return
    arguments = pytest_arguments(session, ON_SIMULATED_GPUS, by_default=workers(more=1))
    run_on_simulated_gpus(session, "-m", DEFAULT, *arguments)


def run_on_simulated_gpus(session: nox.Session, *arguments: str, **env: str) -> None:
    """Compile the simulator where it has not been, and run pytest with four simulated GPUs."""
    programs = workspace()
    run(session, programs, "python", "-m", "dstrat.testing.simulated_gpu.extension")
    run(session, programs, "pytest", *arguments, OMP_NUM_THREADS="1", DSTRAT_SIMULATED_GPUS="4", **env)


def simulator_of_hpu(session: nox.Session, programs: Path) -> str:
    """Return the folder with the simulator of Gaudi, compiled for the torch of these programs."""
    folder = ROOT / ".nox" / "hpu-simulator"
    if not SIMULATED:
        shutil.rmtree(folder, ignore_errors=True)
        install = ("--python", str(programs / "python"), "install", "--quiet", "--no-build-isolation", "--no-deps")
        run(session, bootstrap(), "pip", *install, "--target", str(folder), str(HPU / "tests" / "simulator"))
    if programs not in SIMULATED:
        source = folder / "habana_frameworks" / "torch" / "_simulator.cpp"
        run(session, programs, "python", "-m", "dstrat.testing.simulated_gpu.extension", str(source))
        SIMULATED.add(programs)
    return str(folder)


@nox.session
def neighbours(session: nox.Session) -> None:
    """Train beside packages that users have installed too, in an environment that has them: hydra, lightning ..."""
    arguments = pytest_arguments(session, *BESIDE_OTHERS, by_default=workers("loadgroup", more=1))
    run_beside_others(session, "-m", "not variant and not (clusters and slow)", *arguments)


def run_beside_others(session: nox.Session, *arguments: str) -> None:
    """Run pytest in the environment that has what users install beside dstrat."""
    options = ("--noconftest", "-p", "tests.neighbours.plain_environment")
    run(session, neighbours_environment(), "python", "-m", "pytest", *options, *arguments, OMP_NUM_THREADS="1")


@nox.session
def third_party(session: nox.Session) -> None:
    """Tests of the strategies of other libraries, in an environment that has these; arguments after -- go to pytest.

    A library without a wheel is built by ``tests/build_library.py`` of its package, once for each torch.  The wheel is
    kept in ``~/.cache/dstrat``, or the folder that ``DSTRAT_TEST_EXTENSIONS`` names.  Where that is impossible, the
    tests are skipped with the reason.
    """
    families = [ROOT / "packages" / name for name in THIRD_PARTY]
    programs = third_party_environment()
    for program in (package / "tests" / "build_library.py" for package in families):
        if program.exists():
            run(session, programs, "python", str(program))
    marked = ("-m", f"{DEFAULT} and not wheels")
    folders = [package / "tests" for package in families]
    arguments = pytest_arguments(session, *folders, by_default=workers(more=1))
    environ = {"OMP_NUM_THREADS": "1"}
    if sys.platform == "linux":  # for which it is written
        environ |= {SIMULATOR_OF_HPU: simulator_of_hpu(session, programs), "PT_HPU_LAZY_MODE": "1"}
    run(session, programs, "python", "-m", "pytest", *marked, *arguments, **environ)


@nox.session
def third_party_wheels(session: nox.Session) -> None:
    """The workflow of a third party (minutes): wheels that are built elsewhere, a clean environment, ``dstrat test``.

    Arguments after -- are the aliases to test; by default all of packages that strategies of other libraries have.
    """
    tested = {"bagua": "bagua", "colossalai_torch_ddp": "colossalai", "hivemind": "hivemind", "horovod": "horovod"}
    aliases = session.posargs or list(tested)
    with tempfile.TemporaryDirectory(prefix="third-party-") as folder:
        outside = Path(folder)
        for name in ("core", *tested.values()):
            shutil.copytree(ROOT / "packages" / name, outside / name, ignore=shutil.ignore_patterns("__pycache__"))
            build = ("--quiet", "--wheel", "--no-isolation", f"--outdir={outside / 'dist'}", str(outside / name))
            run(session, workspace(), "pyproject-build", *build)
        wheels = map(str, sorted((outside / "dist").glob("*.whl")))
        make_environment(
            fresh := ROOT / ".nox" / "third-party-wheels",
            (*BUILD_TOOLS, "setuptools<81"),  # the last with pkg_resources, which such libraries import
            ("--constraint=constraints.txt", "pytest>=8.0", *wheels),
            *(("--no-build-isolation", *step) for steps in THIRD_PARTY.values() for step in steps),
            pip=bootstrap() / "pip",
        )
        run(session, fresh / "bin", "python", str(ROOT / "packages" / "horovod" / "tests" / "build_library.py"))
        for alias in aliases:
            # Far from the workspace, with what the package declares of itself, and without the rest of its tests.
            declared = outside / "declared" / alias / "test_conformance.py"
            declared.parent.mkdir(parents=True)
            shutil.copy(outside / tested[alias] / "tests" / declared.name, declared)
            with session.chdir(declared.parent):
                run(session, fresh / "bin", "dstrat", "test", alias, str(declared), OMP_NUM_THREADS="1")


@nox.session
def builds(session: nox.Session) -> None:
    """Compile what DeepSpeed offloads with, once for each torch and processor (minutes), and run the tests of it.

    It is kept in ``~/.cache/dstrat``, or the folder that ``DSTRAT_TEST_EXTENSIONS`` names: from then on the session
    ``tests`` runs these tests too, also in other clones.
    """
    tests_of_deepspeed = ROOT / "packages" / "deepspeed" / "tests"
    run(session, workspace(), "python", str(tests_of_deepspeed / "compiled.py"))
    run(session, workspace(), "pytest", "-m", "builds", *pytest_arguments(session, tests_of_deepspeed, by_default=()))


@nox.session
def clusters(session: nox.Session) -> None:
    """Jobs on SLURM, Open MPI, torchrun, Ray, torchft and hosts in network namespaces, on this machine (minutes).

    What is not installed is skipped, with the command that installs it.  Other arguments go to pytest.
    """
    folders = (ROOT / "tests" / "clusters", ROOT / "packages" / "torchft" / "tests")
    arguments = pytest_arguments(session, *folders, by_default=())
    run(session, workspace(), "pytest", "-m", "clusters", *arguments, OMP_NUM_THREADS="1")
    if not session.posargs:  # Ray Train and Tune are among what users install too
        run_beside_others(session, "-m", "clusters", str(ROOT / "packages" / "ray" / "tests"))


def pytest_arguments(session: nox.Session, *tests: Path, by_default: Sequence[str]) -> list[str]:
    """Return the arguments after --, or the default ones, for a session whose environment serves these tests only.

    Where they name no path (``-- --collect-only``, ``-- -k resume``), pytest takes the tests of the session.
    """
    testpaths = shlex.join(str(path.relative_to(ROOT)) for path in tests)
    return [f"--override-ini=testpaths={testpaths}", *(session.posargs or by_default)]


def workers(distribution: str = "worksteal", more: int = 2) -> list[str]:
    """Return pytest's options for running everything: more processes than cores, as many tests wait for others.

    Each has a fork server, and collects all tests: ten seconds of a core, which is much for a session of a minute.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return [f"--numprocesses={cores + more}", f"--dist={distribution}"]


@nox.session
def wheels(session: nox.Session) -> None:
    """Build sdists and wheels, and install the wheels into a fresh environment, for tests in the same run of nox."""
    build_distributions(session)
    fresh = ROOT / ".nox" / "wheels"
    # Nothing is borrowed from the other environment; torch comes out of pip's cache.
    built = map(str, sorted(DIST.glob("*.whl")))
    make_environment(fresh, ("--constraint=constraints.txt", PIP, *built), pip=bootstrap() / "pip")
    # Once, rather than in each of the processes that tests start side by side.
    run(session, fresh / "bin", "python", "-c", f"import {COMPILED}")
    os.environ[WHEELS] = str(fresh)


def build_distributions(session: nox.Session) -> None:
    """Build an sdist and a wheel of each package into ``.nox/dist``."""
    shutil.rmtree(DIST, ignore_errors=True)
    for package in PACKAGES:
        run(session, workspace(), "pyproject-build", "--quiet", "--no-isolation", f"--outdir={DIST}", str(package))


@nox.session
def release(session: nox.Session) -> None:
    """Build all distributions, check and install them, train once; then upload those that are named after --.

    ``-- --dry-run`` uploads nothing, and ``-- dstrat dstrat-ddp`` these two.  Uploading needs a token, in
    TWINE_PASSWORD or ``~/.pypirc``, or a workflow that the index trusts.
    """
    distributions = {nox.project.load_toml(path / "pyproject.toml")["project"]["name"] for path in PACKAGES}
    names = [argument for argument in session.posargs if argument != "--dry-run"]
    check_release_arguments(session, names, distributions)
    wheels(session)
    twine = environment("twine", (TWINE,), pip=bootstrap() / "pip")
    built = sorted(path for path in DIST.iterdir() if path.name.endswith((".whl", ".tar.gz")))
    run(session, twine, "twine", "check", "--strict", *map(str, built))
    # Requirements, contents, every module, and a training with strategy="ddp", devices=2, from the built files alone.
    run(session, workspace(), "pytest", "-v", str(ROOT / "tests" / "test_wheels.py"))
    files = [path for path in built if not names or distribution_of(path) in names]
    print_release(files, is_uploaded="--dry-run" not in session.posargs)
    if "--dry-run" not in session.posargs:
        run(session, twine, "twine", "upload", "--non-interactive", "--skip-existing", *map(str, files))


def check_release_arguments(session: nox.Session, names: list[str], distributions: set[str]) -> None:
    """End the session unless each name is a distribution of ours, and the named ones can be uploaded."""
    possible = ", ".join(sorted(distributions))
    if unknown := [name for name in names if name not in distributions]:
        session.error(f"there is no distribution {', '.join(unknown)}: name some of {possible}")
    if "--dry-run" in session.posargs:
        return
    if not names:
        session.error(f"name the distributions to upload after --, some of {possible}; or -- --dry-run uploads nothing")
    in_trusted_workflow = "ACTIONS_ID_TOKEN_REQUEST_URL" in os.environ
    has_token = bool(os.environ.get("TWINE_PASSWORD")) or (Path.home() / ".pypirc").exists()
    if not (in_trusted_workflow or has_token):
        session.error(
            "nothing can be uploaded from here: set TWINE_USERNAME=__token__ and TWINE_PASSWORD to a token of the "
            "index, or let the workflow .github/workflows/release.yml publish, which the index trusts "
            "(-- --dry-run does everything else)"
        )


def distribution_of(path: Path) -> str:
    """Return the name of the distribution that a built file belongs to."""
    return path.name.removesuffix(".tar.gz").split("-")[0].replace("_", "-")


def print_release(files: list[Path], *, is_uploaded: bool) -> None:
    """Print a table of the files, with what somebody compares with the index afterwards."""
    rows = [
        (
            distribution_of(path),
            path.name.removesuffix(".tar.gz").split("-")[1],
            path.name,
            f"{path.stat().st_size / 1024:.0f} KiB",
            hashlib.sha256(path.read_bytes()).hexdigest()[:12],
        )
        for path in files
    ]
    rows.insert(0, ("distribution", "version", "file", "size", "sha256"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    print("\nuploading:" if is_uploaded else "\nwould be uploaded:")
    for row in rows:
        print(" ", "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


@nox.session
def demo(session: nox.Session) -> None:
    """Train a small GPT with the ddp strategy on two processes; arguments after -- go to the program."""
    program = str(ROOT / "examples" / "gpt" / "train.py")
    run(session, demo_environment(), "python", program, "--strategy", "ddp", "--devices", "2", *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """Build the guides as a site in .nox/site; whatever is not as it should be is an error."""
    requirements = dependency_group("docs")
    programs = environment("docs", requirements, pip=bootstrap() / "pip", inputs=(ROOT / "pyproject.toml",))
    run(session, programs, "mkdocs", "build", "--strict", "--quiet", NO_MKDOCS_2_WARNING="1")


@nox.session
def bench(session: nox.Session) -> None:
    """Measure against hand-written loops, and with ``-- --with-lightning`` against Lightning."""
    arguments = [argument for argument in session.posargs if argument != "--with-lightning"]
    lightning = ["lightning>=2.6,<2.7"] if "--with-lightning" in session.posargs else []
    programs = workspace("lightning", *lightning) if lightning else workspace()
    run(session, programs, "python", str(ROOT / "benchmarks" / "run.py"), *arguments)


@nox.session
def gpu(session: nox.Session) -> None:
    """Tests, demo and benchmarks on a GPU, with one report in runs/gpu; ``-- --dry-run`` does what needs no GPU.

    On a machine without a network ``python3 benchmarks/gpu/run.py`` does the same with the Python that it has.
    """
    run(session, workspace(), "python", str(ROOT / "benchmarks" / "gpu" / "run.py"), *session.posargs)
