"""What the tests of the portable format share."""

from __future__ import annotations

import pytest

from dstrat.builtin.checkpoint.portable.checkpoint_io import PortableCheckpointIO
from dstrat.errors import CheckpointError


@pytest.fixture
def io():
    return PortableCheckpointIO()


@pytest.fixture
def refusal():
    """Call a function that must refuse, and return what it says."""

    def call(function, *args, **kwargs):
        with pytest.raises(CheckpointError) as caught:
            function(*args, **kwargs)
        return str(caught.value)

    return call
