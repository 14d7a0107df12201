"""Ranks that save and load together, and folders to look at."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest

from dstrat.builtin.checkpoint.portable.checkpoint_io import PortableCheckpointIO
from dstrat.builtin.clusters.local import LocalEnvironment
from dstrat.builtin.launchers.local import LocalLauncher
from dstrat.errors import CheckpointError
from dstrat.parallel.process_group import close_process_group, open_process_group

TIMEOUT = timedelta(seconds=30)


@pytest.fixture
def io():
    return PortableCheckpointIO(timeout=TIMEOUT)


@pytest.fixture
def in_ranks():
    """Run a function in forked ranks with a process group; return what it returned in rank 0."""

    def start(function, *args, ranks=2):
        def run():
            open_process_group(LocalEnvironment(os.environ), backend="gloo", timeout=TIMEOUT)
            try:
                return function(*args)
            finally:
                close_process_group()

        return LocalLauncher(num_processes=ranks, start_method="fork").launch(run)

    return start


@pytest.fixture
def refusal():
    """Call a function that must refuse, and return what it says."""

    def call(function, *args, **kwargs):
        with pytest.raises(CheckpointError) as caught:
            function(*args, **kwargs)
        return str(caught.value)

    return call
