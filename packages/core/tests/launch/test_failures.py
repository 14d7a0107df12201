"""Telling causes from consequences."""

import os
import pickle
import signal

import pytest
import torch.distributed as dist

from dstrat.errors import LaunchError, PeerError, RankFailedError
from dstrat.interfaces.strategy import Strategy
from dstrat.launch.failures import (
    Failure,
    RankEnd,
    failure_error,
    hang_error,
    hung_rank,
    kind_of,
    primary_failure,
    read_failure,
    waits,
    write_failure,
)
from dstrat.launch.nccl_status import describe_collectives
from dstrat.parallel.collectives import reduce_tensor
from dstrat.parallel.step_module import StepModule
from dstrat.training.loops.stopping import EvaluationVotes, Votes
from dstrat.training.metrics.reduction import exchange_epoch, exchange_steps


def raised_here(error):
    try:
        raise error
    except RuntimeError as caught:
        return caught


def raised_by_native_code(error):
    """Return the error as torch's own code leaves it: no Python frame has a `raise` where it came from."""
    generator = (None for _ in range(1))
    next(generator)
    try:
        generator.throw(error)
    except RuntimeError as caught:
        return caught


def test_rank_that_was_at_work_or_waited_is_not_said_to_hang():
    error = hang_error({1: 600.0, 3: 600.0}, {0: SLEEPING, 1: SLEEPING, 2: WAITING, 3: WAITING}, 4)
    assert str(error).startswith("rank 1 of 4 hung: no progress for 600 s, and ranks 0, 2, 3 waited. If this is")
    assert error.rank == 1


@pytest.mark.parametrize(("timed_out", "kind"), [(False, "lost"), (True, "timeout")])
def test_the_error_about_peers_is_a_consequence_also_after_pickling(timed_out, kind):
    error = pickle.loads(pickle.dumps(PeerError("rank 1 did not come", timed_out=timed_out)))
    assert (kind_of(raised_here(error)), str(error)) == (kind, "rank 1 did not come")


def test_an_error_that_causes_itself_is_one_of_the_rank():
    error = ValueError("circle")
    error.__cause__ = error
    assert kind_of(error) == "error"


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ("[...gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:54178: Connection reset by peer.", "lost"),
        ("[...gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:10661.", "lost"),
        ("Gloo connectFullMesh failed with [.../pair.cc:144] no error", "lost"),
        ("ncclRemoteError: A call failed possibly due to a network error or a remote process exiting", "lost"),
        ("[...unbound_buffer.cc:78] Timed out waiting 2000ms for recv operation to complete", "timeout"),
        ("Application timeout caused pair closure", "timeout"),
        ("[Rank 0]: Rank 1 failed to pass monitoredBarrier in 1000 ms", "timeout"),
        ("wait timeout after 3000ms, keys: /x", "timeout"),
        ("Wait timeout", "timeout"),
        ("Timed out after 2 seconds waiting for clients. 1/2 clients joined.", "timeout"),
        ("The size of tensor a (3) must match the size of tensor b (4)", "error"),
        ("ncclInvalidUsage: Duplicate GPU detected: rank 1 and rank 0 both on CUDA device", "error"),
    ],
)
def test_message_of_torch_tells_who_was_the_reason(message, kind):
    assert kind_of(raised_by_native_code(RuntimeError(message))) == kind
    assert kind_of(raised_here(RuntimeError(message))) == "error"


def test_broken_download_is_the_ranks_own_failure():
    assert kind_of(ConnectionResetError(104, "Connection reset by peer")) == "error"


def test_error_that_follows_from_a_lost_peer_is_no_cause():
    error = KeyError("loss")
    error.__context__ = raised_by_native_code(RuntimeError("Connection closed by peer"))
    assert kind_of(error) == "lost"


class MuteError(Exception):
    """Cannot be shown."""

    def __str__(self):
        raise ValueError("no words")


def test_exception_that_cannot_be_shown_is_written_all_the_same(tmp_path):
    write_failure(tmp_path, MuteError())
    failure = read_failure(tmp_path, os.getpid())
    assert failure.headline.endswith("MuteError: (its __str__ raised ValueError)")


def test_failure_that_cannot_be_written_is_printed(tmp_path, capsys):
    """As where the disk is full, which may be what the failure is about."""
    (tmp_path / "job").touch()  # no folder
    write_failure(tmp_path / "job", ValueError("boom"))
    assert capsys.readouterr().err == "ValueError: boom\n"


def test_failure_is_read_back_as_it_was_written(tmp_path):
    assert read_failure(tmp_path, os.getpid()) is None
    try:
        raise ValueError("boom\nmore \ud800")  # a lone surrogate, as in a broken file name
    except ValueError as error:
        write_failure(tmp_path, error)
    failure = read_failure(tmp_path, os.getpid())
    assert failure.headline == "ValueError: boom"
    assert failure.kind == "error"
    assert failure.traceback.splitlines()[0] == "Traceback (most recent call last):"
    assert "boom" in failure.traceback.splitlines()[-2]


def end(rank, kind=None, *, code=1, time_ns=0, error="RuntimeError", message="x", **more):
    failure = kind and Failure(kind=kind, error=error, message=message, traceback="Traceback ...", time_ns=time_ns)
    return RankEnd(rank=rank, exit_code=code, failure=failure, time_ns=time_ns, **more)


@pytest.mark.parametrize(
    ("ends", "rank"),
    [
        ([end(0, "error", time_ns=2), end(1, "error", time_ns=1)], 1),
        ([end(0, "lost", time_ns=1), end(1, "error", time_ns=2)], 1),
        ([end(0, "timeout", time_ns=1), end(1, code=-9, time_ns=2)], 1),
        ([end(0, code=-signal.SIGABRT, time_ns=1), end(1, code=-signal.SIGSEGV, time_ns=2)], 1),
        ([end(0, "lost", time_ns=2), end(1, code=-signal.SIGABRT, time_ns=3)], 1),
        ([end(0, "lost", time_ns=2), end(1, "lost", time_ns=1)], 1),
    ],
)
def test_cause_is_the_first_failure_that_follows_from_no_other(ends, rank):
    assert primary_failure(ends).rank == rank


WAITING = f"""Current thread 0x1 (most recent call first):
  File "{dist.__file__}", line 2834 in all_reduce"""
SLEEPING = """Current thread 0x1 (most recent call first):
  File "train.py", line 7 in fall_asleep"""


@pytest.mark.parametrize(
    ("function", "does_wait"),
    [
        (Votes.take, True),
        (Strategy.reduce_boolean_decision, True),
        (reduce_tensor, True),
        (exchange_steps, True),
        (exchange_epoch, True),
        (Strategy.read_values, True),
        (Strategy.run_step, False),  # a step computes in it
        (StepModule.forward, False),  # likewise
        (EvaluationVotes.between, False),  # a loader that computes is called in it
    ],
)
def test_rank_waits_also_where_it_reads_the_result_of_a_collective_on_a_gpu(function, does_wait):
    code = function.__code__
    stack = f'Current thread 0x1 (most recent call first):\n  File "{code.co_filename}", line 7 in {code.co_name}'
    assert waits(stack, is_busy=True) is does_wait


@pytest.mark.parametrize("stack", [WAITING, SLEEPING])
@pytest.mark.parametrize("is_busy", [True, False])
def test_nccl_knows_better_than_the_stack_which_rank_waits(stack, is_busy):
    pending = describe_collectives({"0": (3, 3), "1": (12, 11)})
    assert pending == "NCCL: pending: collective 12 of group 1"
    assert waits(f"{stack}\n{pending}", is_busy=is_busy)
    assert not waits(f"{stack}\n{describe_collectives({'0': (3, 3), '1': (-1, -1)})}", is_busy=is_busy)


IN_NATIVE_CODE = """Thread 0x1 (most recent call first):
  File "train.py", line 7 in read_loss"""


def test_rank_that_a_watchdog_aborts_has_waited_for_one_that_does_not():
    aborted = end(0, code=-signal.SIGABRT, stack=IN_NATIVE_CODE)
    assert hung_rank([aborted], {1: WAITING, 2: SLEEPING}, 3) == 2
    assert hung_rank([aborted, end(1, "lost")], {2: SLEEPING}, 3) == 2
    assert hung_rank([aborted, end(1, code=-signal.SIGSEGV)], {2: SLEEPING}, 3) is None
    assert hung_rank([aborted], {1: WAITING}, 2) is None
    assert hung_rank([end(0, code=-signal.SIGABRT, stack=SLEEPING)], {1: SLEEPING}, 2) is None  # it has aborted itself


def test_rank_that_left_is_the_cause_only_where_nobody_failed_alone():
    error = failure_error([end(0, code=0, time_ns=3), end(1, "lost"), end(2, "lost")], {}, 3)
    assert (error.rank, error.exit_code) == (0, 0)
    assert str(error).startswith(
        "rank 0 of 3 exited with code 0 before the others had ended: rank 1 lost the connection (RuntimeError: x)"
        "\n\nTraceback of rank 1:\n\nTraceback ..."
    )
    assert failure_error([end(0, code=0), end(1, "lost"), end(2, code=-11)], {}, 3).rank == 2
    assert failure_error([end(0, code=0), end(1, "timeout")], {2: WAITING}, 3).rank == 0
    assert failure_error([end(0, code=0), end(1, "timeout")], {2: SLEEPING}, 3).rank == 2


def test_rank_that_waits_for_others_is_not_the_one_that_hangs():
    assert hung_rank([end(0, "timeout")], {1: WAITING, 2: SLEEPING, 3: WAITING}, 4) == 2
    assert hung_rank([end(0, "timeout")], {1: WAITING}, 2) == 1
    assert hung_rank([end(0, "timeout")], {1: WAITING}, 4) is None  # it may be on another machine
    assert hung_rank([end(0, "timeout")], {}, 4) is None
    assert hung_rank([end(0, "lost")], {1: "in sleep"}, 4) is None
    assert hung_rank([end(0, "timeout"), end(1, "error")], {2: SLEEPING}, 4) is None


@pytest.mark.parametrize(
    ("ends", "message"),
    [
        (
            [end(1, "error", error="ValueError", message="boom")],
            "rank 1 of 4 failed: ValueError: boom\n\nTraceback ...",
        ),
        ([end(1, "error", error="KeyError", message="")], "rank 1 of 4 failed: KeyError\n\nTraceback ..."),
        ([end(1, code=7)], "rank 1 of 4 exited with code 7"),
        (
            [end(1, code=1, was_set_up=False)],
            "rank 1 of 4 exited with code 1 before it ran anything: see its output ab",
        ),
        ([end(1, code=-11, stack="Fatal")], "rank 1 of 4 was killed by SIGSEGV\n\nFatal"),
        (
            [end(1, code=-6, stack='File "torch/distributed/distributed_c10d.py", line 9 in all_gather')],
            (
                "rank 1 of 4 was killed by SIGABRT in a collective, which Gloo does where another rank is in another "
                "one: what the stack below calls, such as a forward pass of shards, must be called by all ranks\n\n"
                'File "torch/distributed/distributed_c10d.py", line 9 in all_gather'
            ),
        ),
        ([end(1, code=-signal.SIGBUS)], "rank 1 of 4 was killed by SIGBUS (perhaps because /dev/shm is full)"),
        ([end(1, code=-40)], "rank 1 of 4 was killed by signal 40"),
        ([end(1, code=None)], "rank 1 of 4 ended, and its exit code is not known"),
    ],
)
def test_message_names_the_rank_and_what_happened_to_it(ends, message):
    error = failure_error(ends, {}, 4)
    assert isinstance(error, RankFailedError)
    assert error.rank == 1
    assert str(error).startswith(message)


def test_rank_that_gave_no_stack_is_still_named():
    message = str(failure_error([end(0, "timeout")], {1: ""}, 2))
    assert message.startswith("rank 1 of 2 hung: rank 0 timed out waiting for it (RuntimeError: x). Its stack")
    assert message.endswith("(not available)\n\nTraceback of rank 0:\n\nTraceback ...")


def test_ranks_that_were_still_running_are_mentioned_where_no_cause_is_known():
    assert "\n(ranks 1, 2 were still running)" in str(failure_error([end(0, "lost")], {1: "", 2: ""}, 3))


def test_error_of_the_launcher_itself_is_shown_as_such():
    error = failure_error([end(1, "error", error="dstrat.errors.LaunchError", message="add a guard")], {}, 2)
    assert (type(error), str(error)) == (LaunchError, "add a guard")
