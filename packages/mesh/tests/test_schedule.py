"""Orders of the passes of a pipeline: each once, none that waits forever, and how long ranks are idle."""

from collections import deque
from itertools import product

import pytest

from dstrat_mesh.schedule import Pass, PassKind, Schedule

SCHEDULES = [
    *(("1F1B", ranks, None, count) for ranks, count in product((2, 3, 4), (1, 2, 5, 8))),
    *(("GPipe", ranks, None, count) for ranks, count in product((2, 4), (1, 3))),
    *(("Interleaved1F1B", ranks, stages, 2 * ranks) for ranks, stages in product((2, 3, 4), (2, 3))),
    *(("LoopedBFS", ranks, stages, 5) for ranks, stages in product((2, 4), (2, 3))),
]
ZERO_BUBBLE = [
    *(("InterleavedZeroBubble", ranks, 1, count) for ranks, count in product((1, 2, 3, 4, 8), (1, 2, 5, 8, 12))),
    *(("InterleavedZeroBubble", ranks, stages, 2 * ranks) for ranks, stages in product((2, 3, 4), (2, 3))),
    ("InterleavedZeroBubble", 8, 4, 32),
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
            source, target = {
                PassKind.FORWARD: (stage - 1, stage + 1),
                PassKind.BACKWARD: (stage + 1, stage - 1),
                PassKind.WEIGHTS: (-1, -1),
            }[step.kind]
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


@pytest.mark.parametrize("options", [*SCHEDULES, *ZERO_BUBBLE], ids=str)
def test_each_rank_has_all_passes_and_waits_for_none_forever(options):
    schedule = Schedule.of(*options)
    chunks, microbatches = range(schedule.stages_per_rank), range(schedule.microbatches)
    kinds = [PassKind.FORWARD, PassKind.BACKWARD, PassKind.WEIGHTS][: 3 if schedule.splits_backward else 2]
    expected = {Pass(*values) for values in product(chunks, microbatches, kinds)}
    for rank in range(schedule.ranks):
        passes = list(schedule.passes(rank))
        assert set(passes) == expected
        assert len(passes) == len(expected)
        for chunk, microbatch in product(chunks, microbatches):
            numbers = [passes.index(Pass(chunk, microbatch, kind)) for kind in kinds]
            assert numbers == sorted(numbers)
    busy = len(expected)
    assert 1 - busy / simulate(schedule) == pytest.approx(schedule.bubble)


@pytest.mark.parametrize("options", ZERO_BUBBLE, ids=str)
def test_gradients_of_weights_fill_idle_time_without_more_activations(options):
    _, ranks, stages, count = options
    schedule = Schedule.of(*options)
    usual = Schedule.of("1F1B" if stages == 1 else "Interleaved1F1B", *options[1:])
    if count >= ranks:  # as long as the passes of ZB-H1, and 1F1B's idle time has gradients of weights in it
        assert schedule.bubble == pytest.approx((ranks - 1) / (3 * count * stages + ranks - 1))
    assert schedule.bubble <= usual.bubble
    assert schedule.activation_share == usual.activation_share
    assert max(schedule.batch_share(rank, [1] * stages) for rank in range(ranks)) == usual.batch_share(0, [1] * stages)


def test_zero_bubble_keeps_activations_until_weights_have_gradients():
    schedule = Schedule.of("InterleavedZeroBubble", 4, 1, 8)
    assert Schedule.of("1F1B", 4, None, 8).batch_share(3, [1]) == 1 / 8
    assert schedule.batch_share(3, [1]) == 4 / 8
    short = " ".join(f"{step.kind.value[0]}{step.microbatch}" for step in schedule.passes(3))
    assert short.startswith("f0 b0 f1 b1 f2 b2 f3 b3 w0 f4 b4 w1")


def test_a_stage_counts_with_the_microbatches_that_it_holds():
    schedule = Schedule.of("Interleaved1F1B", 32, 4, 32)
    assert schedule.batch_share(31, [0, 0, 0, 1]) == 1 / 32  # its backward pass follows each forward pass
    assert schedule.batch_share(31, [1, 0, 0, 0]) == 1
    assert schedule.batch_share(31, [1, 1, 1, 1]) == 97 / 128
    assert Schedule.of("1F1B", 4, None, 8).batch_share(0, [5]) == 4 / 8
    assert Schedule.of("LoopedBFS", 4, 2, 5).batch_share(3, [1, 9]) == 1


@pytest.mark.parametrize(
    ("name", "stages", "size", "expected"),
    [
        ("1F1B", 1, 20, ("1F1B", 8)),
        ("1F1B", 1, 7, ("1F1B", 7)),
        ("InterleavedZeroBubble", 1, 3, ("InterleavedZeroBubble", 3)),
        ("Interleaved1F1B", 2, 7, ("Interleaved1F1B", 4)),  # in groups of as many microbatches as ranks
        ("InterleavedZeroBubble", 2, 3, ("LoopedBFS", 3)),
    ],
)
def test_a_batch_with_few_samples_has_fewer_microbatches(name, stages, size, expected):
    schedule = Schedule.of(name, 4, stages, 8).of_batch(size)
    assert (schedule.name, schedule.microbatches, schedule.stages_per_rank) == (*expected, stages)
    simulate(schedule)
