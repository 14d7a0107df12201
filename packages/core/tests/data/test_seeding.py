"""Random numbers that are the same in every run."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from dstrat import seed_everything
from dstrat.data.loaders import prepare_evaluation_loader, prepare_training_loader
from dstrat.data.random_state import RandomState
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


def test_a_state_that_was_loaded_can_be_saved_again():
    state = RandomState.capture()
    first = drawn()
    again = RandomState.from_state_dict(state.state_dict())
    RandomState.from_state_dict(again.state_dict()).restore()
    assert drawn() == first


@pytest.mark.parametrize("seed", [-1, 2**32, 1.5, float("inf"), "one", [1]])
def test_a_seed_that_is_none_is_an_error(seed):
    with pytest.raises(RequestError, match=r"seed_everything\(.*\) is not possible: give an int from 0 to 4294967295"):
        seed_everything(seed)


def test_a_seed_may_be_written_as_lightning_lets_one_write_it(caplog):
    caplog.set_level("INFO")
    for seed in (5, np.int64(5), 5.0, "5"):
        assert seed_everything(seed, workers=True) == 5
    assert caplog.messages == ["seed set to 5"] * 4
    seed_everything(5, verbose=False)
    assert len(caplog.messages) == 4


def test_without_a_seed_that_of_the_environment_is_taken_or_none(monkeypatch, caplog):
    monkeypatch.setenv("PL_GLOBAL_SEED", "33")
    assert seed_everything() == 33
    first = drawn()
    seed_everything(33)
    assert (drawn(), caplog.messages) == (first, [])
    monkeypatch.setenv("PL_GLOBAL_SEED", "x")
    with pytest.raises(RequestError, match="PL_GLOBAL_SEED='x' is not possible"):
        seed_everything()
    monkeypatch.delenv("PL_GLOBAL_SEED")
    assert seed_everything() == 0
    assert "PL_GLOBAL_SEED is not set: the seed is 0" in caplog.text


class Drawing(Dataset):
    """What a sample draws, and the seed that a worker may make a generator of."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.tensor([*drawn(), get_worker_info().seed % 2**32], dtype=torch.float64)


def _worker_init(worker_id):
    random.random()  # as a function of the user's own, which is called after the seeding


def draws(prepare, strategy, **options):
    """All that two workers of a process draw in an epoch."""
    seed_everything(1)
    loader = prepare(DataLoader(Drawing(), num_workers=2, **options), strategy, distribute=False)
    batches = loader[0] if isinstance(loader, tuple) else loader
    return torch.cat(list(batches)).flatten().tolist()


@pytest.mark.parametrize("prepare", [prepare_training_loader, prepare_evaluation_loader])
def test_workers_draw_numbers_of_their_own_in_each_process(prepare, process):
    first, again, second = (draws(prepare, process(rank, 2)) for rank in (0, 0, 1))
    assert first == again == draws(prepare, process(0, 1))  # rank 0 draws what a single process would
    assert second == draws(prepare, process(1, 2))
    assert not set(first) & set(second)
    assert len(set(second)) == 4 * 3 + 2  # different ones in each worker, too, which has one seed
    own = draws(prepare, process(1, 2), worker_init_fn=_worker_init)
    assert own[1:3] == second[1:3]
    assert own[0] != second[0]


def test_workers_of_processes_that_read_the_same_data_draw_the_same(process):
    same = process(1, 2)
    same.__class__ = type("Same", (type(same),), {"distributed_sampler_kwargs": {"num_replicas": 1, "rank": 0}})
    assert draws(prepare_training_loader, same) == draws(prepare_training_loader, process(0, 2))
