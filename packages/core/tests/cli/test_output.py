"""Tables in a terminal and in a pipe."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest

ALIAS = "a_very_long_name_of_an_alias_that_people_want_to_copy"
TEXT = "what it is, said in a great many words so that they do not fit into one line"
PRINT = f"from dstrat.cli.output import print_table\nprint_table([({ALIAS!r}, {TEXT!r}), ('[b]x', 'y')])"


def in_terminal(bare, columns, script=PRINT):
    """What a script prints in a terminal of so many columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": str(bare), "TERM": "xterm-256color"}
    subprocess.run([sys.executable, "-S", "-c", script], env=environ, stdout=theirs, timeout=400, check=True)
    os.close(theirs)
    text = b""
    while True:
        try:
            chunk = os.read(ours, 65536)
        except OSError:  # how Linux says that the other end is closed
            break
        if not chunk:
            break
        text += chunk
    os.close(ours)
    return text.decode().replace("\r", "")


def without_colours(text):
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


@pytest.mark.parametrize("columns", [160, 80, 40])
def test_a_terminal_gets_wrapped_lines_and_nothing_is_lost(bare_packages, columns):
    shown = in_terminal(bare_packages, columns)
    bare = without_colours(shown)
    assert bare != shown
    assert max(map(len, bare.split("\n"))) <= columns
    assert sorted(bare.replace(" ", "").replace("\n", "")) == sorted(f"{ALIAS}{TEXT}[b]xy".replace(" ", ""))


def test_summaries_of_strategies_are_wrapped_and_not_cut(site):
    site.add("acme", site.component("fast", summary="one process on one device, without communication"))
    script = "from dstrat.cli.main import commands\ncommands(['strategies'], standalone_mode=False)"
    path = f"{site.folder}{os.pathsep}{site.bare}"
    shown = without_colours(in_terminal(path, 40, script))
    lines = [line.rstrip() for line in shown.split("\n")[:3]]
    assert lines == ["acme 1.0", "  fast    one process on one device,", "          without communication"]


@pytest.mark.parametrize("columns", [80, 60])
def test_numbers_are_not_broken_beside_a_long_name(bare_packages, columns):
    row = (f"{ALIAS}/{ALIAS}", "1024 x 4096 x 3 x 3", "float32", "")
    script = f"from dstrat.cli.output import print_table\nprint_table([{row}], list('abcd'), unbroken='bc')"
    shown = without_colours(in_terminal(bare_packages, columns, script))
    assert max(map(len, shown.split("\n"))) <= columns
    assert "  1024 x 4096 x 3 x 3  float32" in shown
    assert "".join(line.split(" ")[0] for line in shown.split("\n")[1:]) == row[0]


def test_ten_columns_of_numbers_are_not_broken(bare_packages):
    headers = ["ms of a step", "total", "compute", "comm", "idle", "optim", "host", "batch", "GiB", "precision"]
    row = (
        "mesh(dp_replicate=2, activation_checkpointing='full')",
        "101",
        "100",
        "0.1",
        "0.1",
        "0.5",
        "0.5",
        "16",
        "79.1",
        "bf16-mixed",
    )
    script = f"from dstrat.cli.output import print_table\nprint_table([{row!r}], {headers}, unbroken={headers[1:]})"
    shown = without_colours(in_terminal(bare_packages, 80, script))
    assert "total  compute  comm  idle  optim  host  batch  GiB   precision" in shown


def test_names_are_not_broken_where_there_is_room(bare_packages):
    assert ALIAS in without_colours(in_terminal(bare_packages, 80))


def test_a_pipe_gets_each_row_on_one_line_without_colours(site):
    assert site.run("-c", PRINT).stdout.split("\n") == [f"{ALIAS}  {TEXT}", f"{'[b]x':{len(ALIAS)}}  y", ""]
