"""Orders of the passes of a pipeline: each once, none that waits forever, and how long ranks are idle."""

from collections import deque
from itertools import product

import pytest

from dstrat_mesh.schedule import Pass, Schedule

SCHEDULES = [
    *(("1F1B", ranks, None, count) for ranks, count in product((2, 3, 4), (1, 2, 5, 8))),
    *(("GPipe", ranks, None, count) for ranks, count in product((2, 4), (1, 3))),
    *(("Interleaved1F1B", ranks, stages, 2 * ranks) for ranks, stages in product((2, 3, 4), (2, 3))),
    *(("LoopedBFS", ranks, stages, 5) for ranks, stages in product((2, 4), (2, 3))),
]


def channel(schedule, origin, target):
    """Return what identifies the messages whose order counts: two ranks and a group of them."""
    group = min(origin, target) % schedule.ranks == schedule.ranks - 1, target < origin
    return origin % schedule.ranks, target % schedule.ranks, group


def simulate(schedule):
    """Run the ranks as their messages let them; return the number of time slots, one for each pass.

    A rank receives the messages of a channel in the order in which they are sent, and sending never waits.
    """
    ranks = [deque(schedule.passes(rank)) for rank in range(schedule.ranks)]
    channels = {}
    for slot in range(10 * len(ranks) * len(ranks[0])):
        if not any(ranks):
            return slot
        sent = []
        for rank, passes in enumerate(ranks):
            if not passes:
                continue
            step = passes[0]
            stage = step.chunk * schedule.ranks + rank
            source, target = (stage + 1, stage - 1) if step.is_backward else (stage - 1, stage + 1)
            if 0 <= source < schedule.num_stages:
                received = channels.get(channel(schedule, source, stage))
                if not received:
                    continue
                assert received.popleft() == (stage, step.microbatch)
            passes.popleft()
            if 0 <= target < schedule.num_stages:
                sent.append((channel(schedule, stage, target), (target, step.microbatch)))
        for key, message in sent:
            channels.setdefault(key, deque()).append(message)
    raise AssertionError(f"{schedule} waits forever: {[list(passes)[:2] for passes in ranks]}")


@pytest.mark.parametrize("options", SCHEDULES, ids=str)
def test_each_rank_has_all_passes_and_waits_for_none_forever(options):
    schedule = Schedule.of(*options)
    chunks, microbatches = range(schedule.stages_per_rank), range(schedule.microbatches)
    expected = {Pass(*values) for values in product(chunks, microbatches, (False, True))}
    for rank in range(schedule.ranks):
        passes = list(schedule.passes(rank))
        assert set(passes) == expected
        assert len(passes) == len(expected)
        for index, step in enumerate(passes):
            assert not step.is_backward or Pass(step.chunk, step.microbatch, False) in passes[:index]
    busy = len(expected)
    assert 1 - busy / simulate(schedule) == pytest.approx(schedule.bubble)


def test_a_stage_counts_with_the_microbatches_that_it_holds():
    schedule = Schedule.of("Interleaved1F1B", 32, 4, 32)
    assert schedule.batch_share(31, [0, 0, 0, 1]) == 1 / 32  # its backward pass follows each forward pass
    assert schedule.batch_share(31, [1, 0, 0, 0]) == 1
    assert schedule.batch_share(31, [1, 1, 1, 1]) == 97 / 128
    assert Schedule.of("1F1B", 4, None, 8).batch_share(0, [5]) == 4 / 8
    assert Schedule.of("LoopedBFS", 4, 2, 5).batch_share(3, [1, 9]) == 1
