"""What the tests of all packages share: one fork server that has loaded what ranks need, and what hardware is there."""

import multiprocessing
import multiprocessing.forkserver
import os
import signal
import sys
from pathlib import Path

import pytest

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
    "dstrat.training.loops.fit_loop",
    "dstrat.training.run",
    "dstrat.training.trainer",
    "dstrat_bagua.plugin",
    "dstrat_bagua.strategy",
    "dstrat_ddp.plugin",
    "dstrat_ddp.strategy",
    "dstrat_deepspeed.plugin",
    "dstrat_deepspeed.strategy",
    "dstrat_fairscale.plugin",
    "dstrat_fsdp.plugin",
    "dstrat_fsdp.strategy",
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


@pytest.hookimpl(tryfirst=True)  # before -m selects by marks
def pytest_collection_modifyitems(items):
    """Mark the standard test that starts a script as users do, which takes seconds, but for one class of each file.

    The way is that of the core's launcher, whatever the strategy.  Of the classes it is the first that has ranks.
    """
    first = {}
    for item in items:
        if getattr(item, "originalname", "") != "test_its_processes_start_as_they_do_for_users":
            continue
        if max(item.cls.world_sizes) > 1 and item.get_closest_marker("variant") is None:
            first.setdefault(item.path, item.cls)
        if first.get(item.path) not in {None, item.cls}:
            item.add_marker(pytest.mark.variant)


@pytest.fixture(scope="session", autouse=True)
def warm_fork_server():
    """Start the fork server first of all, so that a rank starts in milliseconds rather than seconds.

    A process has one, and whoever starts it decides what it has loaded.  It loads beside the tests.
    """
    main = sys.modules["__main__"]
    if not hasattr(main, "__file__"):  # in a worker of pytest-xdist, which would count as a prompt
        main.__file__ = str(Path(pytest.__file__).with_name("__main__.py"))
    multiprocessing.set_forkserver_preload(PRELOADED)
    with pytest.MonkeyPatch.context() as patch:
        if "DS_ACCELERATOR" not in os.environ:
            patch.setenv("DS_ACCELERATOR", "cpu")  # DeepSpeed asks when it is imported
        multiprocessing.forkserver.ensure_running()


@pytest.fixture(autouse=True)
def hardware(request):
    """Skip tests of hardware that is not there, and say so."""
    if request.node.get_closest_marker("cuda"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip(f"torch {torch.__version__} sees no CUDA device")
