"""A restart of a fit that has changed its loggers since it began."""

from __future__ import annotations

from types import SimpleNamespace

from dstrat.launch.recovery import SavePoint
from dstrat.training.checkpoint import recovery


def test_other_loggers_than_those_of_the_checkpoint_are_left_as_they_are(monkeypatch, caplog):
    point = SavePoint(launch=0, checkpoint="a.ckpt", step=1, log_dirs=["logs/version_0"], bookmarks=[{"rows": 3}])
    attempt = SimpleNamespace(save_point=lambda _launch: point)
    monkeypatch.setattr(recovery, "this_attempt", lambda: attempt)
    run = SimpleNamespace(loggers=[], is_fitting=True, is_global_zero=True)
    recovery.join_attempt(run)
    recovery.rewind_loggers(run)
    assert caplog.messages[0] == (
        "this attempt begins with other loggers (0) than the checkpoint was saved with (1): values that were logged "
        "after the checkpoint are not removed"
    )
