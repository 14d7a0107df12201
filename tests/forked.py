"""A process for each test, forked from that of pytest.

Backward passes on GPUs start threads, after which no rank can be forked from that process.
"""

import os
import pickle
from multiprocessing import forkserver

import pytest
from _pytest.reports import TestReport
from _pytest.runner import runtestprotocol


class OwnProcesses:
    """Plugin that runs each test in its own process, and reports what it says.

    Args:
        start_fork_server: Starts the fork server of the process of pytest, which all tests use.
    """

    def __init__(self, start_fork_server):
        self._start_fork_server = start_fork_server

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item):
        self._start_fork_server()
        hook = item.ihook
        hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in _run(item):
            hook.pytest_runtest_logreport(report=report)
        hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True


def _use_fork_server_of_parent():
    # multiprocessing would wait for it, as for a child of this process.
    forkserver.ensure_running = forkserver._forkserver.ensure_running = lambda: None


def _run(item):
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            _use_fork_server_of_parent()
            reports = runtestprotocol(item, log=False)
            data = [item.config.hook.pytest_report_to_serializable(config=item.config, report=one) for one in reports]
            with open(writing, "wb") as file:  # noqa: PTH123 - a descriptor
                pickle.dump(data, file)
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as file:  # noqa: PTH123 - as above
        data = file.read()
    _, status = os.waitpid(child, 0)
    if not data:
        how = f"its process has ended with status {status} before it did"
        return [TestReport(item.nodeid, item.location, dict.fromkeys(item.keywords, 1), "failed", how, "call")]
    return [
        item.config.hook.pytest_report_from_serializable(config=item.config, data=one) for one in pickle.loads(data)
    ]
