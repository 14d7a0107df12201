"""Command line of this interpreter, by which ranks are started the same way."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from dstrat.errors import LaunchError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """A command line of Python, in its parts.

    Attributes:
        flags: The interpreter's own options, such as ``-u``.
        kind: What ``target`` is.
        target: Path of the script, name of the module, or the code.
        argv: What the program finds in ``sys.argv``.
    """

    flags: tuple[str, ...]
    kind: Literal["script", "module", "code", "interactive"]
    target: str = ""
    argv: tuple[str, ...] = ("",)


def parse_command(words: Sequence[str]) -> Command:
    """Take a command line apart as the interpreter does (https://docs.python.org/3/using/cmdline.html)."""
    flags: list[str] = []
    rest = list(words[1:])
    while rest and rest[0].startswith("-") and rest[0] not in ("-", "--"):
        word = rest.pop(0)
        if word == "--check-hash-based-pycs":
            flags += [word, rest.pop(0)]
            continue
        alone, option, value = _split_options(word[1:])
        flags += [f"-{alone}"] if alone else []
        if option in ("c", "m"):
            target = value or rest.pop(0)
            kind: Literal["code", "module"] = "code" if option == "c" else "module"
            return Command(flags=tuple(flags), kind=kind, target=target, argv=(f"-{option}", *rest))
        if option:
            flags += [f"-{option}", value or rest.pop(0)]
    rest = rest[1:] if rest[:1] == ["--"] else rest
    if not rest or rest[0] == "-":
        return Command(flags=tuple(flags), kind="interactive")
    return Command(flags=tuple(flags), kind="script", target=rest[0], argv=tuple(rest))


def interpreter_flags() -> tuple[str, ...]:
    """Return the options that this interpreter was started with."""
    return parse_command(sys.orig_argv).flags


def rerun_command(orig_argv: Sequence[str], argv: Sequence[str], main: ModuleType) -> Command:
    """Return the command that runs the user's script once more.

    A debugger or coverage tool that runs the script stays out of it.

    Args:
        orig_argv: The interpreter's command line.
        argv: ``sys.argv``.
        main: The module ``__main__``.

    Raises:
        LaunchError: There is no script.
    """
    command = parse_command(orig_argv)
    if command.kind == "module" and getattr(main, "__spec__", None) is not None:
        return replace(command, argv=_join_hydra_job(command.argv))
    path = getattr(main, "__file__", None)
    if path is None or not Path(path).is_file() or hasattr(sys, "ps1"):
        raise LaunchError(
            "start_method='popen' runs the script once more in each rank, and this is no script but a notebook, an "
            "interactive session or 'python -c': take a strategy that `dstrat strategies` shows as notebook-safe, or "
            "start_method='fork'"
        )
    own = command.kind == "script" and Path(command.target).name == Path(path).name
    argv = command.argv if own else tuple(argv)  # its own may have been changed since
    return Command(flags=command.flags, kind="script", target=str(Path(path).absolute()), argv=_join_hydra_job(argv))


def _join_hydra_job(argv: tuple[str, ...]) -> tuple[str, ...]:
    """Return the arguments with which a rank uses the folder of the hydra job that this process runs.

    Hydra names a folder after the second at which it was made, so that each rank would have another one.  Of a sweep
    the ranks run all jobs, as this process ends after the first one.
    """
    module = sys.modules.get("hydra.core.hydra_config")
    if module is None or not module.HydraConfig.initialized():
        return argv
    job = module.HydraConfig.get()
    mode = job.get("mode")  # since hydra 1.2
    if mode is not None and mode.name == "MULTIRUN":
        return (*argv, _hydra_value("sweep.dir", Path(job.runtime.cwd, job.sweep.dir)))
    # Without a subfolder for the values, which would be written by each rank.
    return (*argv, _hydra_value("run.dir", job.runtime.output_dir), "hydra.output_subdir=null")


def _hydra_value(name: str, value: object) -> str:
    text = str(value).replace('"', '\\"')
    return f'hydra.{name}="{text}"'


def _split_options(letters: str) -> tuple[str, str, str]:
    """Split ``uWerror`` into what stands alone, the option that takes a value, and the value."""
    for position, letter in enumerate(letters):
        if letter in "cmWX":
            return _repeatable(letters[:position]), letter, letters[position + 1 :]
    return _repeatable(letters), "", ""


def _repeatable(letters: str) -> str:
    """Drop what makes no sense for a rank: staying interactive, and skipping the file's first line."""
    return letters.replace("i", "").replace("x", "")
