"""Peers on the loopback, each a program: they train together, one is killed, one joins late."""

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from tests.warm_program import WarmProgram

pytest.importorskip("hivemind", reason="needs hivemind")

PROGRAM = Path(__file__).with_name("peer_program.py")
MARGIN = 0.02  # of mean squared errors that begin at about 0.6


class Peer:
    """A peer that trains in a process, with the lines that it has printed."""

    def __init__(self, *arguments):
        self.program = WarmProgram(PROGRAM, *map(str, arguments))
        self.lines = []

    def wait_for(self, condition):
        """Return the first line from now on for which the condition holds; the program ends after a minute."""
        for line in iter(self.program.stdout.readline, ""):
            if line.startswith("{"):
                self.lines.append(json.loads(line))
                if condition(self.lines[-1]):
                    return self.lines[-1]
        raise AssertionError(f"the peer has ended: {self.lines[-3:]} {self.program.communicate()}")

    def addresses(self):
        return ",".join(self.wait_for(lambda line: "addresses" in line)["addresses"])

    def final(self):
        return self.wait_for(lambda line: "final" in line)["final"]

    def wait_for_epoch(self, epoch, peers=1):
        return self.wait_for(lambda line: line.get("epoch", -1) >= epoch and line["peers"] >= peers)

    def processes(self):
        """Return the processes of the peer's session: with hivemind's daemon, DHT and averagers."""
        members = []
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = path.read_text().rpartition(")")[2].split()
            except OSError:  # it has ended
                continue
            if int(fields[3]) == self.program.pid and fields[0] != "Z":
                members.append(int(path.parent.name))
        return members

    def wait_until_gone(self, seconds=10.0):
        end = time.monotonic() + seconds
        while (remaining := self.processes()) and time.monotonic() < end:
            time.sleep(0.05)
        return not remaining

    def close(self):
        self.program.stdout.close()
        self.program._stderr.close()
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def start(tmp_path):
    peers = []

    def start_peer(*arguments):
        peers.append(Peer("--target", 256, "--stop-file", tmp_path / "stop", *arguments))
        return peers[-1]

    yield start_peer
    for peer in peers:
        peer.close()


on_linux = pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")


def check_losses(start, peers):
    """Check that the losses of peers that have ended are those of one peer, at most two epochs earlier or later.

    A peer that is slow for a moment adds fewer gradients to one epoch and more to the next.
    """
    finals = [peer.final() for peer in peers]
    epochs = [peer.lines[-2]["epoch"] for peer in peers]
    alone = start("--seconds", 0, "--until", max(epochs) + 2, "--stop-file", "none")
    alone.final()
    for final, epoch in zip(finals, epochs, strict=True):
        near = [line["test_loss"] for line in alone.lines if abs(line.get("epoch", -9) - epoch) <= 2]
        assert min(near) - MARGIN < final < max(near) + MARGIN, (epochs, finals)
    assert max(finals) < 0.5 * next(line["loss"] for line in peers[0].lines if "loss" in line)
    assert all(peer.wait_until_gone() for peer in peers)


@on_linux
@pytest.mark.variant  # of the training of three
def test_two_peers_train_together_and_one_peer_gives_the_same_loss(start, tmp_path):
    first = start()
    second = start("--seed", 1, "--peers", first.addresses())
    together = second.wait_for_epoch(0, peers=2)["epoch"]
    second.wait_for_epoch(together + 3, peers=2)
    first.wait_for_epoch(together + 3, peers=2)
    (tmp_path / "stop").touch()
    check_losses(start, [first, second])


@on_linux
@pytest.mark.variant
def test_when_one_of_three_peers_is_killed_the_others_go_on_and_another_joins(start, tmp_path):
    first = start()
    addresses = first.addresses()
    second, third = (start("--seed", seed, "--peers", addresses) for seed in (1, 2))
    at_death = third.wait_for_epoch(2, peers=3)["epoch"]
    assert len(third.processes()) >= 5  # the peer, its DHT and daemon, and two averagers
    third.program.send_signal(signal.SIGKILL)
    assert third.wait_until_gone()  # no daemon survives
    late = start("--seed", 3, "--peers", addresses)
    begun = late.wait_for_epoch(0, peers=2)["epoch"]
    assert begun >= at_death  # not from the beginning
    for peer in (first, second, late):
        peer.wait_for_epoch(begun + 4, peers=3)
    (tmp_path / "stop").touch()
    check_losses(start, [first, second, late])


@on_linux
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_peer_and_its_daemon(start, number):
    peer = start("--target", 16)
    peer.wait_for_epoch(1)
    assert len(peer.processes()) >= 5
    peer.program.send_signal(number)
    assert peer.wait_until_gone()


@on_linux
def test_an_exception_in_a_step_ends_the_daemon(start):
    peer = start("--target", 16, "--raise-at", 3)
    _, errors = peer.program.communicate()
    assert "ZeroDivisionError" in errors
    assert peer.wait_until_gone(2.0)
