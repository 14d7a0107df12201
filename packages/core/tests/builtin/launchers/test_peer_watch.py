"""Which ranks are taken to hang, by what all ranks publish of themselves."""

import pytest

from dstrat.builtin.launchers.peer_watch import RankState, find_hung_ranks

AT_WORK = RankState(idle_seconds=0.0)
IDLE = RankState(idle_seconds=20.0)
WAITING = RankState(idle_seconds=0.0, is_waiting=True)  # busily, as for a GPU
IDLE_AND_WAITING = RankState(idle_seconds=20.0, is_waiting=True)
ENDED = RankState(has_ended=True)


@pytest.mark.parametrize(
    ("states", "unresponsive", "hung"),
    [
        ([IDLE, WAITING, IDLE_AND_WAITING], set(), [0]),
        ([IDLE, IDLE, WAITING], set(), [0, 1]),
        ([IDLE, AT_WORK, WAITING], set(), []),
        ([WAITING, WAITING, WAITING], set(), []),
        ([IDLE_AND_WAITING, IDLE_AND_WAITING, WAITING], set(), [0, 1]),
        ([AT_WORK, WAITING, WAITING], {0}, [0]),
        ([WAITING, WAITING, IDLE_AND_WAITING], {0}, [0]),
        ([AT_WORK, IDLE, WAITING], {0}, [0, 1]),
        ([AT_WORK, AT_WORK, WAITING], {0}, []),
        ([IDLE, ENDED, ENDED], set(), [0]),
        ([ENDED, WAITING, AT_WORK], {0}, []),
    ],
)
def test_ranks_hang_that_do_not_wait_while_all_others_do(states, unresponsive, hung):
    assert find_hung_ranks(dict(enumerate(states)), unresponsive, limit=10.0) == hung
