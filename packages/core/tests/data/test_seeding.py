"""Random numbers that are the same in every run."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from dstrat import seed_everything
from dstrat.errors import RequestError


def drawn():
    return random.random(), np.random.rand(), torch.rand(1).item()


def test_everything_draws_the_same_again():
    assert seed_everything(7) == 7
    first = drawn()
    seed_everything(7)
    assert drawn() == first
    seed_everything(8)
    assert not set(drawn()) & set(first)


@pytest.mark.parametrize("seed", [-1, 2**32, 1.0, None])
def test_a_seed_that_is_none_is_an_error(seed):
    with pytest.raises(RequestError, match="give an int from 0 to 4294967295"):
        seed_everything(seed)
