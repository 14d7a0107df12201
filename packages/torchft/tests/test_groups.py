"""Replica groups as programs of their own: they train together, die, and join again."""

import json
import os
import random
import re
import signal
import time
from pathlib import Path

import pytest

pytest.importorskip("torchft", reason="needs torchft")

from packages.torchft.tests.group_program import Normed
from packages.torchft.tests.groups import (
    PROGRAM,
    SLOW_ALONE,
    Group,
    check_counters,
    check_same_states,
    has_reached,
    wait_at_lighthouse,
)
from packages.torchft.tests.lighthouse import running_lighthouse
from tests.warm_program import WarmProgram

OWN_LOOP = PROGRAM.with_name("own_loop_program.py")


def test_two_groups_train_together():
    with running_lighthouse(min_replicas=2) as (_, address):
        programs = [
            WarmProgram(PROGRAM, "--group", str(number), "--groups", "2", "--lighthouse", address, "--steps", "6")
            for number in range(2)
        ]
        outputs = [program.run() for program in programs]
    rows = [[json.loads(row) for row in re.findall(r'\{"pid".*?\}', output)] for output in outputs]
    states, losses, steps = ([[row[key] for row in group] for group in rows] for key in ("state", "loss", "common"))
    assert steps == [[1, 2, 3, 4, 5, 6]] * 2
    assert states[0] == states[1]
    assert losses[0] != losses[1]
    assert not {index for row in rows[0] for index in row["indices"]} & {i for row in rows[1] for i in row["indices"]}


def test_groups_evaluate_with_the_same_buffers_also_within_an_accumulation():
    arguments = ("--steps", 24, "--samples", 96, "--accumulate", 2, "--validate-every", 3)
    with running_lighthouse(min_replicas=2) as (_, address):
        groups = ("--groups", 2, "--lighthouse", address)
        programs = [WarmProgram(PROGRAM, *map(str, ("--group", number, *groups, *arguments))) for number in range(2)]
        outputs = [program.run() for program in programs]
    rows = [[json.loads(row) for row in re.findall(r'\{"pid".*?\}', output)] for output in outputs]
    first, second = ([(row["step"], row["lr"], row["validated"], row["mask"]) for row in group] for group in rows)
    assert first == second
    states = [[row["state"] for row in group] for group in rows]
    assert states[0][1::2] == states[1][1::2]  # after each step of the groups
    assert states[0][::2] != states[1][::2]  # of the statistics of their own batches
    assert len({row["lr"] for row in rows[0]}) > 1
    assert {tuple(row["mask"]) for row in rows[0]} == {tuple(Normed().mask.tolist())}  # as far as float32 reaches


@pytest.mark.clusters
@pytest.mark.slow
def test_two_groups_train_as_two_ranks_of_ddp(start, tmp_path):
    with running_lighthouse(min_replicas=2) as (_, address):
        groups = [start(number, 2, address, "--steps", 6) for number in range(2)]
        ddp = Group(tmp_path, PROGRAM, "--strategy", "ddp", "--devices", 2, "--steps", 6, name="ddp")
        for group in (*groups, ddp):
            group.end()
    check_same_states(*groups, ddp)
    assert [row["loss"] for row in groups[0].rows] == [row["loss"] for row in ddp.rows]
    assert {group.final for group in groups} == {ddp.final}


@pytest.mark.clusters
@pytest.mark.slow
@pytest.mark.parametrize("refusing", [(0,), (1,), (0, 1)])
def test_a_refused_step_advances_nothing_and_is_taken_with_the_same_batches(start, tmp_path, refusing):
    with running_lighthouse(min_replicas=2) as (_, address):
        groups = []
        for number in range(2):
            # Learning rates change after this step: a group that gets the state of another one changes its own.
            refuses = ("--refuse-at", 10) if number in refusing else ()
            groups.append(start(number, 2, address, "--steps", 15, *refuses))
        ddp = Group(tmp_path, PROGRAM, "--strategy", "ddp", "--devices", 2, "--steps", 15, name="ddp")
        for group in (*groups, ddp):
            group.end()
    for group in groups:
        check_counters(group)
    check_same_states(*groups, ddp)
    assert {group.final for group in groups} == {ddp.final}


@pytest.mark.clusters
@pytest.mark.slow
def test_a_group_that_gets_a_step_of_the_others_has_their_loss_scale(start):
    with running_lighthouse(min_replicas=2) as (_, address):
        arguments = ("--steps", 20, "--scales-losses")
        groups = [start(0, 2, address, *arguments, "--refuse-at", 10), start(1, 2, address, *arguments)]
        for group in groups:
            group.end()
    scales = [[row["scale"] for row in group.rows] for group in groups]
    assert scales[0] == scales[1]
    assert scales[0][-1] > scales[0][9] > scales[0][0]  # it grows before and after that step
    check_same_states(*groups)


def killed_and_joined(start, address, *arguments):
    """Return a group whose peer is killed, and the group that joins in its place, after both have ended."""
    survivor, killed = (start(number, 2, address, *arguments) for number in range(2))
    killed.wait_for(has_reached(8))
    killed.kill_rank()
    killed.process.wait(300)
    joined = start(1, 2, address, *arguments, name="joined")
    for group in (survivor, joined):
        group.end()
    assert "has joined after step" in joined.text
    return survivor, joined


@pytest.mark.clusters
@pytest.mark.slow
def test_a_group_that_joins_within_an_accumulation_has_the_weights_of_the_others(start):
    with running_lighthouse() as (_, address):
        survivor, joined = killed_and_joined(start, address, "--steps", 60, "--accumulate", 3, *SLOW_ALONE)
    steps = [row["step"] for row in joined.rows]
    assert steps[1] == steps[0]  # its first step has a single batch
    check_same_states(survivor, joined)
    assert survivor.final == joined.final


@pytest.mark.clusters
@pytest.mark.slow
def test_a_group_that_joins_has_the_buffers_of_the_others(start):
    with running_lighthouse() as (_, address):
        arguments = ("--steps", 80, "--samples", 256, "--validate-every", 4, *SLOW_ALONE)
        survivor, joined = killed_and_joined(start, address, *arguments)
    check_same_states(survivor, joined)
    validated = [{row["step"]: row["validated"] for row in group.rows[4:]} for group in (survivor, joined)]
    assert [step for step in validated[1] if validated[0][step] != validated[1][step]] == []
    assert survivor.final == joined.final


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.clusters
@pytest.mark.slow
def test_a_group_that_is_killed_costs_the_other_no_batch_and_joins_again(start, victim):
    with running_lighthouse() as (_, address):
        arguments = ("--steps", 150, *SLOW_ALONE)
        groups = [start(number, 2, address, *arguments) for number in range(2)]
        killed, survivor = groups[victim], groups[1 - victim]
        killed.wait_for(has_reached(15))
        killed.kill_rank()
        killed.process.wait(300)
        begun = survivor.rows[-1]["step"]
        joined = start(victim, 2, address, *arguments, name="joined")
        for group in (survivor, joined):
            group.end()
    for group in (killed, survivor, joined):
        check_counters(group)
    assert survivor.rows[0]["step"] == 1
    assert joined.rows[0]["step"] > begun
    check_same_states(killed, survivor)
    check_same_states(survivor, joined)
    assert survivor.final == joined.final
    assert {row["groups"] for row in survivor.rows} == {1, 2}
    indices = [index for group in (killed, survivor, joined) for row in group.rows for index in row["indices"]]
    assert len(indices) == len(set(indices))  # each sample is read at most once


@pytest.mark.clusters
@pytest.mark.slow
def test_one_of_three_groups_that_dies_leaves_the_others_with_the_same_weights(start):
    with running_lighthouse() as (_, address):
        groups = [start(number, 3, address, "--steps", 60, "--seconds", 0.05) for number in range(3)]
        groups[1].wait_for(has_reached(20))
        groups[1].kill_rank()
        for group in (groups[0], groups[2]):
            group.end()
            check_counters(group)
    check_same_states(groups[0], groups[2])
    assert groups[0].final == groups[2].final


@pytest.mark.clusters
@pytest.mark.slow
def test_a_group_of_two_ranks_ends_with_one_of_them_and_joins_again_by_itself(start):
    with running_lighthouse() as (_, address):
        arguments = ("--steps", 200, *SLOW_ALONE, "--devices", 2, "--max-restarts", 2)
        other, pair = (start(number, 2, address, *arguments) for number in range(2))
        pair.wait_for(has_reached(10))
        pair.kill_rank()
        for group in (other, pair):
            group.end()
    check_counters(other)
    check_same_states(other, pair)
    assert other.final == pair.final
    assert "was killed by SIGKILL" in pair.text
    assert len({row["pid"] for row in pair.rows}) == 2


@pytest.mark.clusters
@pytest.mark.slow
def test_a_group_waits_for_as_many_as_are_needed_without_taking_a_step(start):
    with running_lighthouse() as (_, address):
        arguments = ("--steps", 60, "--seconds", 0.1, "--min-replica-size", 2, "--quorum-timeout", 60)
        survivor, killed = (start(number, 2, address, *arguments) for number in range(2))
        killed.wait_for(has_reached(10))
        killed.kill_rank()
        killed.process.wait(300)
        time.sleep(6)  # several quorums, of one group
        taken = survivor.rows[-1]["step"]
        joined = start(1, 2, address, *arguments, name="joined")
        for group in (survivor, joined):
            group.end()
    check_counters(survivor)
    assert taken == killed.rows[-1]["step"]
    assert joined.rows[0]["step"] == taken + 1  # no step was taken without it
    check_same_states(survivor, joined)
    assert {row["groups"] for row in survivor.rows} == {2}


@pytest.mark.clusters
@pytest.mark.slow
def test_too_few_groups_are_an_error_that_says_what_was_waited_for(start):
    with running_lighthouse() as (_, address):
        group = start(0, 2, address, "--min-replica-size", 2, "--quorum-timeout", 4)
        assert group.process.wait(300) != 0
    assert "waited for min_replica_size=2 groups for quorum_timeout=4 s, and 1 of them came" in group.text
    assert group.rows == []


@pytest.mark.clusters
@pytest.mark.slow
def test_a_lighthouse_that_waits_for_more_groups_is_named(start):
    with running_lighthouse(min_replicas=2) as (_, address):
        group = start(0, 2, address, "--quorum-timeout", 4)
        assert group.process.wait(300) != 0
    assert f"got no quorum from the lighthouse {address} within quorum_timeout=4 s" in group.text


@pytest.mark.clusters
@pytest.mark.slow
def test_a_lighthouse_that_dies_ends_the_groups_with_its_address(start):
    with running_lighthouse() as (lighthouse, address):
        groups = [
            start(number, 2, address, "--steps", 10000, "--seconds", 0.1, "--quorum-timeout", 5) for number in range(2)
        ]
        groups[0].wait_for(has_reached(5))
        lighthouse.kill()
        for group in groups:
            assert group.process.wait(300) != 0
    assert any(f"the lighthouse {address} does not answer any more" in group.text for group in groups)


@pytest.mark.clusters
@pytest.mark.slow
def test_a_paused_group_fails_with_its_distance_and_joins_again_by_itself(start):
    with running_lighthouse() as (_, address):
        arguments = ("--steps", 200, *SLOW_ALONE, "--max-restarts", 2)
        running, paused = (start(number, 2, address, *arguments) for number in range(2))
        paused.wait_for(has_reached(10))
        rank = paused.rows[-1]["pid"]
        os.kill(rank, signal.SIGSTOP)
        running.wait_for(has_reached(paused.rows[-1]["step"] + 5))
        os.kill(rank, signal.SIGCONT)
        for group in (running, paused):
            group.end()
    check_counters(running)
    assert re.search(r"is \d+ steps behind the others", paused.text)
    check_same_states(running, paused)
    assert running.final == paused.final


@pytest.mark.clusters
@pytest.mark.slow
@pytest.mark.parametrize("stopped", [0, 1])
def test_groups_that_took_a_step_apart_do_not_train_on_with_different_weights(start, tmp_path, stopped):
    file = tmp_path / "both"
    with running_lighthouse() as (_, address):
        arguments = ("--steps", 150, *SLOW_ALONE, "--max-restarts", 2)
        repeats = ("--refuse-at", 10, "--wait-at", 10, "--file", file)
        special = [("--stop-at", 10) if number == stopped else repeats for number in range(2)]
        groups = [start(number, 2, address, *arguments, *special[number]) for number in range(2)]
        pair, alone = groups[stopped], groups[1 - stopped]
        alone.wait_for(has_reached(10))  # which the other group has averaged with it, and it has repeated
        taken = pair.rows[9]["state"], alone.rows[9]["state"]
        os.kill(pair.rows[-1]["pid"], signal.SIGCONT)
        wait_at_lighthouse(address, "[1/1 participants healthy][2 heartbeating]")
        file.touch()
        for group in groups:
            group.end()
    assert len(set(taken)) == 2
    check_counters(pair)
    assert re.search(
        r"replica group \d has other weights than the others: its step 10 was completed by 1 of the groups, and theirs "
        r"by 2, as a connection was lost at its end: start it again",
        alone.text,
    )
    states = {row["step"]: row["state"] for row in pair.rows}
    rows = alone.rows[10:]  # of the restart
    assert rows[0]["pid"] != alone.rows[0]["pid"]
    assert [row["step"] for row in rows if row["state"] != states[row["step"]]] == []
    assert alone.final == pair.final


@pytest.mark.clusters
@pytest.mark.slow
@pytest.mark.parametrize(("devices", "failing_rank"), [(1, 0), (2, 0), (2, 1)])
def test_a_transfer_of_the_state_that_fails_is_repeated(start, devices, failing_rank):
    with running_lighthouse() as (_, address):
        arguments = ("--steps", 150, *SLOW_ALONE, "--devices", devices)
        failing = ("--fail-transfer", 1, "--failing-rank", failing_rank)
        survivor, killed = (start(number, 2, address, *arguments) for number in range(2))
        killed.wait_for(has_reached(10))
        killed.kill_rank()
        killed.process.wait(300)
        begun = survivor.rows[-1]["step"]
        joined = start(1, 2, address, *arguments, *failing, name="joined")
        for group in (survivor, joined):
            group.end()
    assert "the start of replica group 1 is repeated with the groups that are left: " in joined.text
    for group in (survivor, joined):
        check_counters(group)
    assert survivor.rows[0]["step"] == 1
    assert joined.rows[0]["step"] > begun
    check_same_states(survivor, joined)
    assert survivor.final == joined.final


@pytest.mark.clusters
@pytest.mark.slow
@pytest.mark.parametrize("failing_rank", [0, 1])
def test_a_transfer_that_fails_within_the_training_is_repeated_by_all_ranks(start, failing_rank):
    with running_lighthouse(min_replicas=2) as (_, address):
        # At the start group 1 gets the first values of group 0, and then the result of the step that it has refused.
        failing = ("--refuse-at", 10, "--fail-transfer", 2, "--failing-rank", failing_rank)
        groups = [
            start(number, 2, address, "--steps", 20, "--devices", 2, *(failing if number == 1 else ()))
            for number in range(2)
        ]
        for group in groups:
            group.end()
            check_counters(group)
    assert "failed for a test" in groups[1].text
    check_same_states(*groups)
    assert groups[0].final == groups[1].final


@pytest.mark.clusters
@pytest.mark.slow
def test_all_ranks_begin_with_the_first_values_of_one_group(start):
    with running_lighthouse(min_replicas=2) as (_, address):
        groups = [start(number, 2, address, "--steps", 5, "--devices", 2, "--seed", number) for number in range(2)]
        for group in groups:
            group.end()
    weights = [re.findall(r'"rank": (\d), "weights": "(\w+)"', group.text) for group in groups]
    assert [sorted(rank for rank, _ in each) for each in weights] == [["0", "1"]] * 2
    assert len({digest for each in weights for _, digest in each}) == 1


@pytest.mark.clusters
@pytest.mark.slow
def test_a_group_that_comes_after_the_end_trains_nothing_alone(start):
    with running_lighthouse() as (_, address):
        arguments = ("--steps", 20, "--seconds", 0.05)
        completes, killed = (start(number, 2, address, *arguments) for number in range(2))
        killed.wait_for(has_reached(10))
        killed.kill_rank()
        completes.end()
        # Also the group that has completed it, which may have been killed before its program has ended.
        for number in (1, 0):
            late = start(number, 2, address, *arguments, "--quorum-timeout", 4, name=f"late-{number}")
            assert late.process.wait(200) != 0
            assert late.rows == []
            assert (
                "the training has ended: replica group 0 has completed it after step 20, and replica group "
                f"{number}, at step 0, would train the rest without it"
            ) in late.text
        again = [start(number, 2, address, "--steps", 3, name=f"again-{number}") for number in range(2)]
        for group in again:  # all groups can begin another training
            group.end()
    assert [[row["step"] for row in group.rows] for group in again] == [[1, 2, 3]] * 2


@pytest.mark.clusters
@pytest.mark.slow
def test_groups_with_different_numbers_of_ranks_are_an_error(start):
    with running_lighthouse() as (_, address):
        groups = [start(0, 2, address), start(1, 2, address, "--devices", 2)]
        assert [group.process.wait(150) for group in groups] == [1, 1]
    assert any("the replica groups have 1 and 2 ranks, and each rank averages" in group.text for group in groups)


@pytest.mark.clusters
@pytest.mark.slow
def test_a_group_joins_again_in_a_loop_of_ones_own(start):
    with running_lighthouse() as (_, address):
        groups = [start(number, 2, address, 120, program=OWN_LOOP) for number in range(2)]
        groups[1].wait_for(lambda group: bool(group.rows) and group.rows[-1]["groups"] == 2 and has_reached(15)(group))
        groups[1].kill_rank()
        groups[1].process.wait(300)
        joined = start(1, 2, address, 120, program=OWN_LOOP, name="joined")
        for group in (groups[0], joined):
            group.end()
    check_same_states(groups[0], joined)
    assert [row["step"] for row in groups[0].rows] == list(range(1, 121))
    assert joined.rows[-1]["step"] == 120


@pytest.mark.clusters
@pytest.mark.slow
def test_groups_that_have_all_died_go_on_from_the_checkpoint_with_the_most_steps(start, tmp_path):
    with running_lighthouse() as (_, address):
        arguments = ("--steps", 40, "--seconds", 0.1, "--folder", tmp_path / "checkpoints")
        groups = [start(number, 2, address, *arguments) for number in range(2)]
        groups[0].wait_for(has_reached(12))
        groups[0].kill_rank()
        groups[1].wait_for(has_reached(22))
        groups[1].kill_rank()
        for group in groups:
            group.process.wait(300)
        again = [start(number, 2, address, *arguments, name=f"again-{number}") for number in range(2)]
        for group in again:
            group.end()
            check_counters(group)
    assert {group.rows[0]["step"] for group in again} == {21}
    assert {row["groups"] for group in again for row in group.rows} == {2}
    check_same_states(*again)
    assert again[0].final == again[1].final
    indices = [index for group in (*groups, *again) for row in group.rows for index in row["indices"]]
    repeated = [index for row in groups[1].rows if row["step"] > 20 for index in row["indices"]]
    assert len(indices) - len(set(indices)) == len(repeated)  # of the steps after the checkpoint


# The command


def run_command(tmp_path, *arguments):
    return Group(tmp_path, "-m", "dstrat_torchft", *arguments, name="command")


@pytest.mark.clusters
@pytest.mark.slow
def test_the_command_starts_a_killed_group_again(tmp_path):
    command = run_command(tmp_path, "--heartbeat-timeout", 2, PROGRAM, "--steps", 150, *SLOW_ALONE)
    try:
        command.wait_for(has_reached(15))
        command.kill_rank()
        command.end()
    finally:
        command.kill()
    assert re.search(r"replica group \d was killed by SIGKILL; restart 1 of 3", command.text)
    assert re.search(r"replica group \d has joined after step \d+", command.text)
    assert len({row["pid"] for row in command.rows}) == 3
    states = {}
    for row in command.rows:
        states.setdefault(row["step"], set()).add(row["state"])
    assert [step for step, each in states.items() if len(each) > 1] == []
    assert len(set(re.findall(r'"final": "(\w+)"', command.text))) == 1


@pytest.mark.clusters
@pytest.mark.slow
def test_random_kills_lose_no_step_and_repeat_no_sample(tmp_path):
    options = ("--groups", 3, "--max-restarts", 10, "--heartbeat-timeout", 2)
    command = run_command(tmp_path, *options, PROGRAM, "--steps", 300, *SLOW_ALONE, "--samples", 20000)
    generator, kills = random.Random(5), 0
    try:
        command.wait_for(has_reached(15))
        while command.process.poll() is None and kills < 6:
            time.sleep(generator.uniform(2, 5))
            recent = {row["pid"] for row in command.rows if time.time() - row["time"] < 8}
            alive = sorted(pid for pid in recent if Path(f"/proc/{pid}").exists())
            if len(alive) > 1:  # one has to have the state
                os.kill(generator.choice(alive), signal.SIGKILL)
                kills += 1
        command.end(400)
    finally:
        command.kill()
    states = {}
    for row in command.rows:
        assert row["step"] == row["common"] == row["scheduled"]
        states.setdefault(row["step"], set()).add((row["state"], row["lr"]))
    assert command.text.count("restart ") >= kills > 3
    assert sorted(states) == list(range(1, 301))
    assert [step for step, each in states.items() if len(each) > 1] == []
    indices = [index for row in command.rows for index in row["indices"]]
    assert len(indices) == len(set(indices))
    assert len(set(re.findall(r'"final": "(\w+)"', command.text))) == 1


@pytest.mark.clusters
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_process_outlives_the_command(tmp_path, number):
    command = run_command(tmp_path, PROGRAM, "--steps", 10000, "--seconds", 0.1)
    try:
        command.wait_for(has_reached(3))
        command.process.send_signal(number)
        code = command.process.wait(300)
        assert code == (-number if number == signal.SIGKILL else 128 + number)
        pids = {row["pid"] for row in command.rows}
        deadline = time.monotonic() + 300
        while any(Path(f"/proc/{pid}").exists() for pid in pids):
            assert time.monotonic() < deadline
            time.sleep(0.1)
    finally:
        command.kill()


def test_the_command_refuses_more_groups_than_it_starts(capsys):
    from dstrat_torchft.__main__ import main

    with pytest.raises(SystemExit):
        main(["--groups", "2", "--min-groups", "3", "train.py"])
    assert "--min-groups 3 is more than --groups 2" in capsys.readouterr().err


@pytest.mark.clusters
@pytest.mark.slow
def test_groups_that_always_fail_end_the_command(tmp_path):
    program = tmp_path / "fails.py"
    program.write_text("raise SystemExit(3)")
    command = run_command(tmp_path, "--max-restarts", 1, program)
    assert command.process.wait(300) == 1
    assert command.text.count("has exited with code 3; not started again: --max-restarts 1") == 2
