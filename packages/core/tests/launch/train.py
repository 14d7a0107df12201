"""The program that the tests of the launchers run: ``train.py METHOD CASE``; rank 1 is the one with a difference."""

import multiprocessing.util
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from dstrat.builtin.clusters.local import LocalEnvironment
from dstrat.launch.external import ExternalLauncher
from dstrat.launch.local import LocalLauncher
from dstrat.launch.rank import note_signal
from dstrat.launch.signals import leave_lost_terminal


def launcher(method):
    if LocalEnvironment().creates_processes_externally:
        return ExternalLauncher()
    return LocalLauncher(num_processes=2, start_method=method, grace=0.5)  # so that the tests take less time


def write(name, text=""):
    unfinished = Path(f"{name}.{os.getpid()}.unfinished")  # both ranks may write the same file
    unfinished.write_text(str(text))
    unfinished.replace(name)


def work(case):
    rank = int(os.environ["RANK"])
    ACTIONS[case](rank)
    return {"rank": rank, "world_size": int(os.environ["WORLD_SIZE"])}


def succeed(rank):
    write(f"ran-{rank}", os.environ["MASTER_PORT"])


def fail(rank):
    if rank == 1:
        raise ValueError("boom")
    time.sleep(600)


def die(rank):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


def leave(rank):
    if rank == 1:
        sys.exit(3)
    time.sleep(600)


def fail_stubbornly(rank):
    """Rank 0 does not react to SIGTERM."""
    if rank == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        write("deaf")
        time.sleep(600)
    while not Path("deaf").exists():
        time.sleep(0.01)
    raise ValueError("boom")


def wait(rank):
    write(f"waits-{rank}", os.getpid())
    time.sleep(600)


def wait_deaf(rank):
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    wait(rank)


def wait_with_workers(rank):
    """Each rank has a child that survives polite signals, as workers of a DataLoader may."""
    subprocess.Popen(["/bin/sh", "-c", "trap '' TERM INT HUP; while :; do sleep 1; done"])
    wait(rank)


def die_with_workers(rank):
    """Rank 1 dies when its worker and that of rank 0 are there."""
    subprocess.Popen(["/bin/sh", "-c", "trap '' TERM INT HUP; while :; do sleep 1; done"])
    write(f"waits-{rank}", os.getpid())
    while not Path(f"waits-{1 - rank}").exists():
        time.sleep(0.01)
    die(rank)


def start_session():
    """Start what leaves the rank's session, and survives polite signals."""
    subprocess.Popen(["/bin/sh", "-c", "trap '' TERM INT HUP; while :; do sleep 1; done"], start_new_session=True)


def wait_with_sessions(rank):
    start_session()
    wait(rank)


def die_with_sessions(rank):
    start_session()
    write(f"waits-{rank}", os.getpid())
    while not Path(f"waits-{1 - rank}").exists():
        time.sleep(0.01)
    die(rank)


def die_with_sockets(rank):
    """Rank 1 has made a folder for sockets, as DataLoaders with workers do."""
    if rank == 1:
        multiprocessing.util.get_temp_dir()
    die(rank)


def fail_without_folder(rank):
    """A cleaner of temporary files removes what the ranks leave their errors in."""
    if rank == 0:
        write("waits-0", os.getpid())
        time.sleep(600)
    while not Path("waits-0").exists():  # rank 0 reads its function in that folder
        time.sleep(0.01)
    shutil.rmtree(os.environ["DSTRAT_JOB"])
    raise ValueError("boom")


def stop_gently(rank):
    """Stop at the signal, a little later, as a loop that finishes its step."""
    write(f"waits-{rank}", os.getpid())
    try:
        time.sleep(600)
    except KeyboardInterrupt:
        time.sleep(0.2)
        write(f"stopped-{rank}")
        raise


def stop_badly(rank):
    """Rank 1 meets an error of its own while it stops."""
    write(f"waits-{rank}", os.getpid())
    try:
        time.sleep(600)
    except KeyboardInterrupt:
        if rank == 1:
            raise OSError("disk full") from None
        time.sleep(600)


def stop_together(rank):
    """Stop when any rank is told to, as a loop whose ranks agree on it in each step."""
    signal.signal(signal.SIGTERM, lambda *_: write("told"))
    write(f"waits-{rank}", os.getpid())
    while not Path("told").exists():
        time.sleep(0.01)
    time.sleep(0.2 * rank)
    write(f"stopped-{rank}")
    sys.exit(128 + signal.SIGTERM)


def stop_together_and_note(rank):
    """The same, and the rank that is told leaves a note of it, as the Trainer does."""
    signal.signal(signal.SIGTERM, lambda *_: (note_signal(signal.SIGTERM), write("told")))
    write(f"waits-{rank}", os.getpid())
    while not Path("told").exists():
        time.sleep(0.01)
    sys.exit(128 + signal.SIGTERM)


def count(rank):
    """Count as long as nobody says that it is enough."""
    write(f"waits-{rank}", os.getpid())
    number = 0
    while not Path("enough").exists():
        number += 1
        write(f"counted-{rank}", number)
        time.sleep(0.01)


def hang_up(rank):
    """Print something after the terminal has gone, as a progress bar does in the last step."""

    def stop(number, frame):
        leave_lost_terminal()
        print("the last step", flush=True)
        write(f"stopped-{rank}", "printed")
        sys.exit(128 + number)

    signal.signal(signal.SIGHUP, stop)
    write(f"waits-{rank}", os.getpid())
    time.sleep(600)


def leave_well(rank):
    sys.exit(0)


def leave_as_interrupted(rank):
    if rank == 1:
        os._exit(130)


def leave_as_ended(rank):
    if rank == 1:
        os._exit(143)


def open_group_alone(rank):
    """Rank 1 waits in native code for rank 0, which is interrupted before it comes."""
    if rank == 0:
        wait(rank)
    import torch.distributed as dist

    write("opens-1", os.getpid())
    store = dist.FileStore(os.environ["DSTRAT_JOB"] + "/test")
    dist.init_process_group("gloo", store=store, rank=1, world_size=2)


def leave_without_a_word(rank):
    os._exit(0)


ACTIONS = {
    action.__name__: action
    for action in (
        succeed, fail, die, leave, fail_stubbornly, wait, wait_deaf, wait_with_workers, die_with_workers,
        wait_with_sessions, die_with_sessions, die_with_sockets, fail_without_folder, stop_gently,
        stop_badly, stop_together, stop_together_and_note, count, hang_up, leave_well, leave_without_a_word,
        leave_as_interrupted, leave_as_ended, open_group_alone,
    )
}  # fmt: skip


def main():
    method, case = sys.argv[1:]
    result = launcher(method).launch(work, case)
    sys.stdout.write(f"result {result}\n")  # at once, so that two ranks do not mix their lines


if __name__ == "__main__":
    main()
