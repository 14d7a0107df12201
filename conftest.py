"""What the tests of all packages share: one fork server that has loaded what ranks need, and what hardware is there."""

import importlib
import importlib.util
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import sys
from pathlib import Path

import pytest

if importlib.util.find_spec("hypothesis"):  # not in all environments
    from hypothesis import HealthCheck, settings

    # A busy machine is no failure.
    settings.register_profile("any speed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("any speed")

ON_SIMULATED_GPUS = os.environ.get("DSTRAT_TEST_ACCELERATOR") == "simulated_gpu"
PRELOADED = [
    "torch",
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.optim",
    "dstrat.builtin.accelerators.cpu",
    "dstrat.checkpoint.portable.load",
    "dstrat.checkpoint.portable.save",
    "dstrat.launch.external",
    "dstrat.builtin.plugin",
    "dstrat.training.loops.sources",
    "dstrat.training.execution",
    "dstrat.training.loops.fit_loop",
    "dstrat.training.run",
    "dstrat.training.trainer",
    "dstrat_bagua.plugin",
    "dstrat_bagua.strategy",
    "dstrat_ddp.plugin",
    "dstrat_ddp.strategy",
    "dstrat_deepspeed.plugin",
    "dstrat_deepspeed.strategy",
    "dstrat_diloco.strategy",
    "dstrat_fairscale.plugin",
    "dstrat_fsdp.plugin",
    "dstrat_fsdp.strategy",
    "dstrat_mesh.strategy",
    "dstrat_torchao.plugin",
    "deepspeed",
    "deepspeed.module_inject.auto_ep_layer",
    "dstrat.testing.ranks.fits",
    "dstrat.testing.ranks.launching",
    "packages.colossalai.tests.warm",
    "packages.hpu.tests.warm",
    "packages.xla.tests.warm",
    "pytest",
]


def pytest_sessionstart():
    """Let SIGINT and SIGHUP end the tests and the programs that they start, also in a run in the background.

    A shell without job control starts such a run with SIGINT ignored, and ``nohup`` any run with SIGHUP ignored.
    Whatever it starts inherits that.
    """
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


def pytest_addoption(parser):
    """Add the options by which a second environment leaves out what has passed in a first one."""
    group = parser.getgroup("environments")
    group.addoption("--record-passed", type=Path, metavar="FILE", help="write the names of the tests that pass")
    group.addoption("--leave-out", type=Path, metavar="FILE", help="leave these tests out")


def pytest_configure(config):
    """Record in the process that the results of all others come to."""
    if (file := config.getoption("--record-passed")) and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(file))
    if ON_SIMULATED_GPUS:
        from tests import forked

        from dstrat.testing import simulated_gpu

        simulated_gpu.load().allow_forks()
        for name in PRELOADED:  # once, rather than in the process of each test
            if name.startswith(("torch", "dstrat.")):
                importlib.import_module(name)
        config.pluginmanager.register(forked.OwnProcesses(start_fork_server))


class Recorder:
    """Names of the tests that have passed, one in a line of a file."""

    def __init__(self, file):
        self.file = file
        self.passed = []

    def pytest_runtest_logreport(self, report):
        if report.when == "call" and report.passed:
            self.passed.append(report.nodeid)

    def pytest_sessionfinish(self):
        self.file.write_text("\n".join(self.passed), encoding="utf-8")


def leave_out_passed(config, items):
    """Deselect the tests that have passed in another environment."""
    file = config.getoption("--leave-out")
    if file is None or not file.exists():
        return
    passed = set(file.read_text(encoding="utf-8").split("\n"))
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in passed])
    items[:] = [item for item in items if item.nodeid not in passed]


@pytest.hookimpl(tryfirst=True)  # before -m selects by marks
def pytest_collection_modifyitems(config, items):
    """Mark the standard test that starts a script as users do, which takes seconds, but for one class of all.

    The way is that of the core's launcher, whatever the strategy.  Of the classes it is the first that has ranks.
    """
    first = None
    for item in items:
        if getattr(item, "originalname", "") != "test_its_processes_start_as_they_do_for_users":
            continue
        if max(item.cls.world_sizes) > 1 and item.get_closest_marker("variant") is None:
            first = first or item.cls
        if first not in {None, item.cls}:
            item.add_marker(pytest.mark.variant)
    leave_out_passed(config, items)


def start_fork_server():
    """Start the fork server, unless it runs; whoever starts it decides what it has loaded."""
    main = sys.modules["__main__"]
    if not hasattr(main, "__file__"):  # in a worker of pytest-xdist, which would count as a prompt
        main.__file__ = str(Path(pytest.__file__).with_name("__main__.py"))
    multiprocessing.set_forkserver_preload(PRELOADED)
    with pytest.MonkeyPatch.context() as patch:
        if "DS_ACCELERATOR" not in os.environ:
            patch.setenv("DS_ACCELERATOR", "cpu")  # DeepSpeed asks when it is imported
        multiprocessing.forkserver.ensure_running()


@pytest.fixture(scope="session", autouse=True)
def warm_fork_server():
    """Start the fork server first of all, so that a rank starts in milliseconds rather than seconds.

    It loads beside the tests.  On simulated GPUs that of all tests runs already.
    """
    start_fork_server()


@pytest.fixture(autouse=True)
def hardware(request):
    """Skip tests of hardware that is not there, and say so."""
    if request.node.get_closest_marker("cuda"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip(f"torch {torch.__version__} sees no CUDA device")
    if ON_SIMULATED_GPUS and request.node.get_closest_marker("on_cpu"):
        pytest.skip("it shows something of the CPU, and trainings are tested on simulated GPUs")
