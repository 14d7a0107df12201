"""What an own loop does in several processes."""

from __future__ import annotations

import time

import pytest

import dstrat
from dstrat import GradientSyncStrategy, OwnLoop


class Averaging(GradientSyncStrategy):
    """Gradients averaged by hand."""

    start_method = "fork"

    def synchronize_gradients(self, gradients):
        for gradient in gradients:
            gradient.copy_(self.reduce(gradient))


@pytest.fixture
def launch():
    """Runs a function in two processes."""

    def run(function, *args, strategy=Averaging):
        return OwnLoop(dstrat.build(strategy=strategy(), accelerator="cpu", devices=2)).launch(function, *args)

    return run


def test_no_rank_ends_before_the_last_is_done(launch, tmp_path):
    class Telling(Averaging):
        def teardown(self):
            (tmp_path / f"ended_{self.global_rank}").touch()
            super().teardown()

    def late_on_rank_1(loop):
        if loop.strategy.global_rank == 1:
            time.sleep(0.5)
            (tmp_path / "seen").write_text(str([path.name for path in tmp_path.glob("ended_*")]))

    launch(late_on_rank_1, strategy=Telling)
    assert (tmp_path / "seen").read_text() == "[]"
    assert len(list(tmp_path.glob("ended_*"))) == 2
