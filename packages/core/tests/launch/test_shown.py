"""What is shown of a failure of a rank that nobody catches, and what is left where somebody does."""

from __future__ import annotations

import functools
import sys

import pytest

from dstrat.errors import RankFailedError
from dstrat.launch.local import show_without_stack


@pytest.fixture
def hook(monkeypatch):
    """What shows errors, as a test may change it."""
    shown = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, value, traceback: shown.append(value))
    return shown


def test_it_is_shown_by_its_message_and_other_errors_as_before(hook, capsys):
    error, other = RankFailedError("rank 1 failed", rank=1), RankFailedError("another", rank=0)
    show_without_stack(error)
    sys.excepthook(type(error), error, None)
    sys.excepthook(type(other), other, None)
    assert capsys.readouterr().err == "dstrat.errors.RankFailedError: rank 1 failed\n"
    assert hook == [other]


def test_nothing_is_left_when_it_was_caught(hook):
    before = sys.excepthook
    for _ in range(3):
        show_without_stack(RankFailedError("rank 1 failed", rank=1))
    assert sys.excepthook is before


def test_what_was_set_since_stays(hook, capsys):
    error = RankFailedError("rank 1 failed", rank=1)
    show_without_stack(error)
    ours = sys.excepthook
    sys.excepthook = later = functools.partial(ours)
    sys.excepthook(type(error), error, None)
    del error
    assert sys.excepthook is later
    sys.excepthook(ValueError, ValueError("x"), None)
    assert len(hook) == 1
