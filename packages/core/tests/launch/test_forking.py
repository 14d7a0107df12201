from __future__ import annotations

import gc
import os

from dstrat.launch.local import LocalLauncher


class Thread:
    """Stands for what waits, when it is freed, for a thread that a fork does not copy."""

    def __init__(self, path):
        self.path, self.pid, self.cycle = path, os.getpid(), self

    def __del__(self):
        if os.getpid() != self.pid:
            self.path.touch()


def test_a_forked_rank_does_not_free_the_garbage_of_its_parent(tmp_path):
    gc.disable()
    try:
        Thread(tmp_path / "freed")
        LocalLauncher(num_processes=2, start_method="fork").launch(gc.collect)
        assert not gc.isenabled()
    finally:
        gc.enable()
    gc.collect()
    assert not (tmp_path / "freed").exists()
    LocalLauncher(num_processes=2, start_method="fork").launch(gc.collect)
    assert gc.isenabled()
