"""Loaders that know their own place."""

import threading

import pytest

from dstrat.data.continued import Beginning
from dstrat.data.placed import PlacedLoader
from dstrat.errors import MisuseError


class Locked(list):
    def state_dict(self):
        return {"lock": threading.Lock()}

    def load_state_dict(self, state):
        raise AssertionError(state)


def test_a_place_that_cannot_be_copied_is_named_with_its_loader():
    loader = Locked([1, 2])
    with pytest.raises(
        MisuseError, match=r"state_dict of the loader, a Locked, cannot be copied \(cannot pickle .*lock"
    ):
        list(PlacedLoader(loader, Beginning.of(loader)))
