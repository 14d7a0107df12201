"""Whether a checkpoint is of a job whose ranks read the same shards of the data."""

import pytest

from dstrat.checkpoint.strategy_state import describe_move, job_sizes, state_to_follow


@pytest.fixture
def sharing(process):
    """Makes the strategy of one of several processes that share each batch."""

    class Sharing(process):
        distributed_sampler_kwargs = {"num_replicas": 1, "rank": 0}  # noqa: RUF012 - not changed

    return Sharing


def saved_by(world_size, readers):
    return {"world_size": world_size, "readers": readers}


def test_a_job_of_as_many_ranks_that_share_batches_is_another_one(process, sharing):
    for make, readers in ((process, 2), (sharing, 1)):
        same, moved = (job_sizes(make(1, 2), saved_by(2, count)) for count in (readers, 3 - readers))
        assert same[0] == same[1]
        assert moved[0] != moved[1]


@pytest.mark.parametrize(
    ("saved", "said"),
    [
        (saved_by(2, 2), "2 processes with 2 shards of the data and is continued by 2 with 1"),
        (saved_by(4, 4), "4 processes and is continued by 2"),
    ],
)
def test_what_has_changed_is_told(sharing, saved, said):
    assert describe_move(*job_sizes(sharing(0, 2), saved)) == said


def test_an_older_checkpoint_is_of_the_same_job_if_as_many_ranks_saved_it(sharing):
    same, moved = (job_sizes(sharing(0, ranks), {"world_size": 2}) for ranks in (2, 3))
    assert same[0] == same[1]
    assert (moved[0].readers, moved[1].readers) == (2, 3)
    own = {"random": "of this rank"}
    assert state_to_follow(sharing(1, 2), None, "", [], own) is own
