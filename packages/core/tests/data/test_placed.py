"""Loaders that know their own place."""

import threading

import pytest

from dstrat.data.resume import Beginning, StatefulLoader
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
        list(StatefulLoader(loader, Beginning.of(loader), is_read_ahead=True))


class Counting:
    """Says where it is, and counts how often it is asked."""

    def __init__(self):
        self.position = self.asked = 0

    def __iter__(self):
        for self.position in range(1, 7):
            yield self.position

    def state_dict(self):
        self.asked += 1
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


def read(loader, count, *, is_read_ahead):
    placed = StatefulLoader(loader, Beginning.of(loader), is_read_ahead=is_read_ahead)
    assert placed.latest_position is None
    batches = iter(placed)
    assert [next(batches) for _ in range(count)] == list(range(1, count + 1))
    return placed, batches


def test_a_place_is_asked_for_a_checkpoint_alone_unless_batches_are_read_ahead():
    placed, batches = read(loader := Counting(), 4, is_read_ahead=False)
    assert loader.asked == 0
    assert placed.position_after(4) == placed.latest_position == {"position": 4}
    assert placed.position_after(3) is None
    assert next(batches) == 5
    assert placed.position_after(5) == {"position": 5}
    ahead, _ = read(loader := Counting(), 4, is_read_ahead=True)
    assert loader.asked == 4
    assert [ahead.position_after(number) for number in (3, 4)] == [{"position": 3}, {"position": 4}]


def test_a_place_that_was_kept_is_not_that_of_another_reader():
    placed, batches = read(loader := Counting(), 2, is_read_ahead=False)
    placed.record_position()
    assert list(loader) == [1, 2, 3, 4, 5, 6]
    assert placed.position_after(2) == placed.latest_position == {"position": 2}
    assert list(batches) == [3, 4, 5, 6]
    assert placed.latest_position == {"position": 6}


def test_after_the_last_batch_the_place_is_before_the_end():
    class Endless(Counting):
        """Begins again from its state at the end, as one of torchdata does."""

        def __iter__(self):
            yield from super().__iter__()
            self.position = 0

    placed = StatefulLoader(loader := Endless(), Beginning.of(loader), is_read_ahead=True)
    assert list(placed) == [1, 2, 3, 4, 5, 6]  # with its end, before the block of the last one has run
    assert placed.position_after(6) == {"position": 6}
    assert placed.latest_position == {"position": 0}
