"""Replica groups that train apart and exchange every few steps: they die, also in an exchange, and join again."""

import json
import os
import random
import re
import signal
import time
from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("torchft", reason="needs torchft")

from packages.torchft.tests.group_program import Net, loader
from packages.torchft.tests.groups import PROGRAM, SLOW_ALONE, Group, check_counters, has_reached, wait_at_lighthouse
from packages.torchft.tests.lighthouse import running_lighthouse
from tests.warm_program import WarmProgram

from dstrat import seed_everything

OWN_LOOP = PROGRAM.with_name("own_loop_program.py")
EVERY = 5
DILOCO = ("--strategy", "torchft_diloco", "--every", EVERY)


def run_warm(*arguments, of=2):
    """Run groups in warm processes; return the rows of each, and the values of its parameters at the end."""
    with running_lighthouse(min_replicas=of) as (_, address):
        options = ("--groups", of, "--lighthouse", address, *arguments)
        programs = [WarmProgram(PROGRAM, *map(str, ("--group", number, *options))) for number in range(of)]
        outputs = [program.run() for program in programs]
    rows = [[json.loads(row) for row in re.findall(r'\{"pid".*?\}', output)] for output in outputs]
    return rows, [json.loads(re.search(r'\{"values": (.*?)\}', output)[1]) for output in outputs]


def hand_written(module, rows, *, every=EVERY, lr=0.7, momentum=0.9):
    """Return the losses of groups with the batches of their rows, one after the other in one process, and the weights.

    A group whose rows end before the others' has died, and counts in no exchange after that.  The last round may be
    shorter: it ends with the mean of the weights.
    """
    dataset = loader(4096).dataset
    outer = [parameter.detach().clone().requires_grad_() for parameter in module.parameters()]
    sgd = torch.optim.SGD(outer, lr=lr, momentum=momentum, nesterov=True)
    groups = [type(module)() for _ in rows]
    setups = [group.configure_optimizers() for group in groups]
    losses = [[] for _ in rows]
    for group in groups:
        group.load_state_dict(module.state_dict())
    for step in range(1, max(map(len, rows)) + 1):
        alive = [number for number, of_group in enumerate(rows) if len(of_group) >= step]
        for number in alive:
            group, setup, of_group, its_losses = groups[number], setups[number], rows[number], losses[number]
            loss = group.training_step(dataset[of_group[step - 1]["indices"]], step)
            setup["optimizer"].zero_grad()
            loss.backward()
            setup["optimizer"].step()
            setup["lr_scheduler"]["scheduler"].step()
            its_losses.append(float(loss.detach()))
        if step % every == 0:
            copies = zip(*(groups[number].parameters() for number in alive), strict=True)
            means = [sum(values) / len(alive) for values in copies]
            for weight, mean in zip(outer, means, strict=True):
                weight.grad = weight.detach() - mean.detach()
            sgd.step()
            for group in groups:
                nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(outer).detach(), group.parameters())
    vectors = [nn.utils.parameters_to_vector(groups[number].parameters()).detach() for number in alive]
    return losses, sum(vectors) / len(alive)


def first_values():
    """Return the module that the programs begin with."""
    seed_everything(3, verbose=False)
    return Net()


def test_losses_and_weights_are_those_of_a_loop_written_by_hand():
    rows, values = run_warm(*DILOCO, "--steps", 13)  # two rounds, and a part of one
    losses, weights = hand_written(first_values(), rows)
    for group, of_group in zip(rows, losses, strict=True):
        assert [row["loss"] for row in group] == pytest.approx(of_group, rel=1e-6, abs=1e-7)
        assert [row["common"] for row in group] == [row["step"] for row in group] == list(range(1, 14))
    assert values[0] == values[1]  # to the bit
    torch.testing.assert_close(torch.tensor(values[0]), weights, rtol=1e-6, atol=1e-6)
    same = [step for step, *each in zip(range(1, 14), *rows, strict=True) if each[0]["state"] == each[1]["state"]]
    assert same == [5, 10]


@pytest.mark.clusters
@pytest.mark.slow
def test_groups_send_a_share_of_what_they_send_in_each_step():
    [[each_step, *_], [rarely, *_]] = (run_warm(*options, "--steps", 20)[0] for options in ((), DILOCO))
    print(rarely[-1]["bytes"] / each_step[-1]["bytes"])
    assert rarely[-1]["bytes"] / each_step[-1]["bytes"] == pytest.approx(1 / EVERY, rel=0.05)


def check_exchanges(*groups):
    """Check that weights and the outer optimizer are the same to the last bit after each exchange of both groups."""
    ends = [{row["step"]: row["state"] for row in group.rows if row["step"] % EVERY == 0} for group in groups]
    common = set.intersection(*map(set, ends))
    assert common
    assert [step for step in common if len({end[step] for end in ends}) > 1] == []


def check_joined(joined):
    """Check that a group has joined at the end of a round of the others."""
    check_counters(joined)
    assert joined.rows[0]["step"] % EVERY == 0
    assert "has joined after step" in joined.text


@pytest.mark.clusters
@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_group_that_is_killed_between_exchanges_joins_again(start, victim, devices):
    with running_lighthouse() as (_, address):
        arguments = (*DILOCO, "--steps", 83, *SLOW_ALONE, "--devices", devices)
        groups = [start(number, 2, address, *arguments) for number in range(2)]
        killed, survivor = groups[victim], groups[1 - victim]
        killed.wait_for(has_reached(12))
        killed.kill_rank()
        killed.process.wait(300)
        begun = survivor.rows[-1]["step"]
        joined = start(victim, 2, address, *arguments, name="joined")
        for group in (survivor, joined):
            group.end()
    for group in (killed, survivor):
        check_counters(group)
    check_joined(joined)
    assert survivor.rows[0]["step"] == 1
    assert survivor.rows[-1]["step"] == joined.rows[-1]["step"] == 83
    assert joined.rows[0]["step"] >= begun
    check_exchanges(killed, survivor)
    check_exchanges(survivor, joined)
    assert survivor.final == joined.final
    assert {row["groups"] for row in survivor.rows} == {1, 2}


@pytest.mark.clusters
@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_group_that_is_killed_in_an_exchange_joins_again(start, victim):
    with running_lighthouse() as (_, address):
        arguments = (*DILOCO, "--steps", 80, *SLOW_ALONE)
        dies = [("--die-in", 3) if number == victim else () for number in range(2)]
        groups = [start(number, 2, address, *arguments, *dies[number]) for number in range(2)]
        killed, survivor = groups[victim], groups[1 - victim]
        killed.process.wait(100)
        joined = start(victim, 2, address, *arguments, name="joined")
        for group in (survivor, joined):
            group.end()
    assert killed.rows[-1]["step"] == 14
    check_counters(survivor)
    check_joined(joined)
    # In the exchange in which it has joined the changes of the other group count alone.
    alone = survivor.rows[: joined.rows[0]["step"] + EVERY]
    losses, _ = hand_written(first_values(), [alone, killed.rows])
    assert [row["loss"] for row in alone] == pytest.approx(losses[0], rel=1e-5, abs=1e-6)
    assert [row["step"] for row in survivor.rows] == list(range(1, 81))
    assert "exchange 3 is repeated with the groups that are left" in survivor.text
    check_exchanges(killed, survivor)
    check_exchanges(survivor, joined)
    assert survivor.final == joined.final


@pytest.mark.clusters
@pytest.mark.slow
def test_a_group_that_has_copied_one_that_dies_goes_on_with_its_changes(start, tmp_path):
    file = tmp_path / "joins"
    with running_lighthouse() as (_, address):
        arguments = (*DILOCO, "--steps", 22)
        dies = ("--die-in", 3, "--wait-at", 14, "--file", file)
        copied, killed = (start(number, 2, address, *arguments, *dies) for number in range(2))
        killed.wait_for(has_reached(14))
        killed.kill_rank()
        killed.process.wait(300)
        joined = start(1, 2, address, *arguments, name="joined")
        wait_at_lighthouse(address, "[1/1 participants healthy]")  # it asks for a quorum
        file.touch()
        assert copied.process.wait(100) == -signal.SIGKILL
        joined.end()
    check_joined(joined)
    assert "the group whose weights the others have copied has died" in joined.text
    assert [row["step"] for row in joined.rows] == list(range(15, 23))


@pytest.mark.clusters
@pytest.mark.slow
@pytest.mark.parametrize("refusing", [(0,), (0, 1)])
def test_a_refused_exchange_is_made_with_the_same_changes(start, refusing):
    with running_lighthouse(min_replicas=2) as (_, address):
        refuses = [("--refuse-at", 2) if number in refusing else () for number in range(2)]
        arguments = (*DILOCO, "--steps", 20, "--max-restarts", 1, "--quorum-timeout", 90)
        groups = [start(number, 2, address, *arguments, *refuses[number]) for number in range(2)]
        for group in groups:
            group.end()
    if refusing == (0, 1):
        for group in groups:
            check_counters(group)
        losses, _ = hand_written(first_values(), [group.rows for group in groups])
        assert [row["loss"] for row in groups[0].rows] == pytest.approx(losses[0], rel=1e-6, abs=1e-7)
    else:  # the other group has made the exchange, and is a round ahead
        assert "has missed 1 exchange of the others" in groups[0].text
        check_counters(groups[1])
    assert groups[0].final == groups[1].final


@pytest.mark.clusters
@pytest.mark.slow
def test_a_group_that_joins_in_the_last_exchange_has_its_result(start, tmp_path):
    file = tmp_path / "joins"
    with running_lighthouse() as (_, address):
        arguments = (*DILOCO, "--steps", 17)
        survivor, killed = (start(number, 2, address, *arguments, "--wait-at", 16, "--file", file) for number in (0, 1))
        killed.wait_for(has_reached(16))
        killed.kill_rank()
        killed.process.wait(300)
        joined = start(1, 2, address, *arguments, name="joined")
        wait_at_lighthouse(address, "[1/1 participants healthy]")  # it asks for a quorum
        file.touch()
        for group in (survivor, joined):
            group.end()
    assert joined.rows == []
    assert "has joined after step 17" in joined.text
    assert survivor.final == joined.final


@pytest.mark.clusters
@pytest.mark.slow
def test_a_group_that_has_missed_an_exchange_says_so_and_joins_again_by_itself(start):
    with running_lighthouse() as (_, address):
        arguments = (*DILOCO, "--steps", 90, *SLOW_ALONE, "--max-restarts", 2)
        running, paused = (start(number, 2, address, *arguments) for number in range(2))
        paused.wait_for(has_reached(12))
        rank = paused.rows[-1]["pid"]
        os.kill(rank, signal.SIGSTOP)
        running.wait_for(has_reached(paused.rows[-1]["step"] + EVERY + 1))
        os.kill(rank, signal.SIGCONT)
        for group in (running, paused):
            group.end()
    check_counters(running)
    assert re.search(r"replica group 1 has missed \d exchanges? of the others", paused.text)
    check_exchanges(running, paused)
    assert running.final == paused.final


@pytest.mark.clusters
@pytest.mark.slow
def test_a_round_is_resumed_exactly(start, tmp_path):
    file = tmp_path / "never"
    arguments = ("--strategy", "torchft_diloco", "--every", 7, "--steps", 30)
    with running_lighthouse() as (_, address):
        whole = [start(number, 2, address, *arguments, name=f"whole-{number}") for number in range(2)]
        for group in whole:
            group.end()
    arguments = (*arguments, "--folder", tmp_path / "checkpoints")
    with running_lighthouse() as (_, address):
        for group in [start(number, 2, address, *arguments, "--wait-at", 12, "--file", file) for number in range(2)]:
            group.wait_for(has_reached(12))
            group.kill_rank()
            group.process.wait(300)
        resumed = [start(number, 2, address, *arguments, name=f"resumed-{number}") for number in range(2)]
        for group in resumed:
            group.end()
    for group, other in zip(resumed, whole, strict=True):
        assert [row["step"] for row in group.rows] == list(range(11, 31))  # from a checkpoint within the second round
        keys = ("step", "common", "scheduled", "loss", "state", "indices")
        assert [[row[key] for key in keys] for row in group.rows] == [
            [row[key] for key in keys] for row in other.rows[10:]
        ]
    assert {group.final for group in (*resumed, *whole)} == {whole[0].final}


@pytest.mark.clusters
@pytest.mark.slow
def test_random_kills_leave_the_groups_with_the_same_weights(tmp_path):
    options = ("--groups", 3, "--max-restarts", 10, "--heartbeat-timeout", 2)
    arguments = (*DILOCO, "--steps", 200, "--seconds", 0.2, "--seconds-alone", 0.6, "--samples", 20000)
    command = Group(tmp_path, "-m", "dstrat_torchft", *options, PROGRAM, *arguments, name="command")
    generator, kills = random.Random(5), 0
    try:
        command.wait_for(has_reached(12))
        while command.process.poll() is None and kills < 4:
            time.sleep(generator.uniform(4, 8))
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
        if row["step"] % EVERY == 0:
            states.setdefault(row["step"], set()).add((row["state"], row["lr"]))
    assert command.text.count("restart ") >= kills > 1
    assert sorted(states) == list(range(EVERY, 201, EVERY))
    assert [step for step, each in states.items() if len(each) > 1] == []
    assert len(set(re.findall(r'"final": "(\w+)"', command.text))) == 1


@pytest.mark.clusters
@pytest.mark.slow
def test_groups_with_rounds_of_different_lengths_are_an_error(start):
    with running_lighthouse(min_replicas=2) as (_, address):
        groups = [start(number, 2, address, *DILOCO[:2], "--every", 5 + number) for number in range(2)]
        assert groups[1].process.wait(100) == 1
    assert (
        "replica group 1 has every=6, and another one every=5: groups exchange after the same steps" in groups[1].text
    )


@pytest.mark.clusters
@pytest.mark.slow
def test_a_group_joins_again_in_a_loop_of_ones_own(start):
    with running_lighthouse() as (_, address):
        command = (150, f"torchft_diloco(every={EVERY})")
        groups = [start(number, 2, address, *command, program=OWN_LOOP) for number in range(2)]
        groups[1].wait_for(lambda group: bool(group.rows) and group.rows[-1]["groups"] == 2 and has_reached(12)(group))
        groups[1].kill_rank()
        groups[1].process.wait(300)
        joined = start(1, 2, address, *command, program=OWN_LOOP, name="joined")
        for group in (groups[0], joined):
            group.end()
    check_exchanges(groups[0], joined)
    assert [row["step"] for row in groups[0].rows] == list(range(1, 151))
    assert joined.rows[0]["step"] % EVERY == 0
    assert joined.rows[-1]["step"] == 150
