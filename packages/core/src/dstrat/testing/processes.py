"""Snapshot of the process table and of listening sockets."""

from __future__ import annotations

import ctypes
import os
import re
import sys
import time
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_PROC = Path("/proc")
_LISTENS = "0A"  # include/net/tcp_states.h
_LOOPBACK = re.compile(r"0100007F|0000000000000000FFFF00000100007F|00000000000000000000000001000000", re.IGNORECASE)
_OF_MULTIPROCESSING = "resource_tracker"  # which ends with the interpreter that needs it


def can_look() -> bool:
    """Return whether this system shows its processes and sockets in /proc."""
    return sys.platform == "linux" and (_PROC / "self" / "net" / "tcp").exists()


def adopt_orphans() -> None:
    """Make this process the parent of what its children leave behind, so that it can be found."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def left_over(patience: float = 1.5) -> list[str]:
    """Return what still runs of everything that this process and its children have started, after a moment."""
    deadline = time.monotonic() + patience
    while (found := _descendants()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def open_to_others() -> list[str]:
    """Return the addresses beyond the loopback on which this process listens."""
    own = _own_sockets()
    found = []
    for name in ("tcp", "tcp6"):
        for line in (_PROC / "self" / "net" / name).read_text().splitlines()[1:]:
            columns = line.split()
            address, port = columns[1].split(":")
            if columns[3] == _LISTENS and columns[9] in own and not _LOOPBACK.fullmatch(address):
                found.append(f"{'every address' if not address.strip('0') else address}, port {int(port, 16)}")
    return found


def _own_sockets() -> set[str]:
    sockets = set()
    for descriptor in (_PROC / "self" / "fd").iterdir():
        try:
            target = os.readlink(descriptor)  # noqa: PTH115 - what it names is no path
        except OSError:  # closed by another thread, or the one that lists this folder
            continue
        if target.startswith("socket:["):
            sockets.add(target[8:-1])
    return sockets


def _descendants() -> list[str]:
    """Return the living processes below this one, as people recognise them."""
    parents: dict[int, int] = {}
    for folder in _PROC.iterdir():
        if folder.name.isdigit():
            try:
                state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            except OSError:  # it has ended
                continue
            if state not in "ZX":
                parents[int(folder.name)] = int(parent)
    return [name for pid in parents if _is_below(pid, parents) and _OF_MULTIPROCESSING not in (name := _name(pid))]


def _is_below(pid: int, parents: dict[int, int]) -> bool:
    while (pid := parents.get(pid, 0)) > 1:
        if pid == os.getpid():
            return True
    return False


def _name(pid: int) -> str:
    try:
        words = (_PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return f"process {pid}"
    return f"process {pid} ({' '.join(words)[:80].strip()})"
