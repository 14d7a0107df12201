"""Command line of this interpreter, from which the command of the ranks is made."""

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
    """A parsed command line of Python.

    Attributes:
        flags: Options of the interpreter, such as ``-u``.
        kind: The kind of ``target``.
        target: Path of the script, name of the module, or the code.
        argv: The ``sys.argv`` of the program.
    """

    flags: tuple[str, ...]
    kind: Literal["script", "module", "code", "interactive"]
    target: str = ""
    argv: tuple[str, ...] = ("",)


def parse_command(arguments: Sequence[str]) -> Command:
    """Parse a command line as the interpreter does (https://docs.python.org/3/using/cmdline.html)."""
    flags: list[str] = []
    remaining = list(arguments[1:])
    while remaining and remaining[0].startswith("-") and remaining[0] not in ("-", "--"):
        argument = remaining.pop(0)
        if argument == "--check-hash-based-pycs":  # the only long option with a value
            flags += [argument, remaining.pop(0)]
            continue
        alone, option, value = _split_options(argument[1:])  # Python takes "-uWerror" and "-W error"
        flags += [f"-{alone}"] if alone else []
        if option in ("c", "m"):
            target = value or remaining.pop(0)
            kind: Literal["code", "module"] = "code" if option == "c" else "module"
            return Command(flags=tuple(flags), kind=kind, target=target, argv=(f"-{option}", *remaining))
        if option:
            flags += [f"-{option}", value or remaining.pop(0)]
    remaining = remaining[1:] if remaining[:1] == ["--"] else remaining
    if not remaining or remaining[0] == "-":
        return Command(flags=tuple(flags), kind="interactive")
    return Command(flags=tuple(flags), kind="script", target=remaining[0], argv=tuple(remaining))


def interpreter_flags() -> tuple[str, ...]:
    """Return the options that this interpreter was started with."""
    return parse_command(sys.orig_argv).flags


def rerun_command(orig_argv: Sequence[str], argv: Sequence[str], main: ModuleType) -> Command:
    """Return the command that runs the user's script once more.

    It does not include a debugger or coverage tool that runs the script.

    Args:
        orig_argv: The interpreter's command line.
        argv: ``sys.argv``.
        main: The module ``__main__``.

    Raises:
        LaunchError: There is no script.
    """
    command = parse_command(orig_argv)
    # Without __spec__, __main__ is a script that ``python -m pdb`` or the like runs in its place.
    if command.kind == "module" and getattr(main, "__spec__", None) is not None:
        return replace(command, argv=_join_hydra_job(command.argv))
    path = getattr(main, "__file__", None)
    if path is None or not Path(path).is_file() or hasattr(sys, "ps1"):
        raise LaunchError(
            "start_method='popen' runs the script once more in each rank, and this is no script but a notebook, an "
            "interactive session or 'python -c': use a strategy that `dstrat strategies` shows as notebook-safe, or "
            "start_method='fork'"
        )
    runs_main = command.kind == "script" and Path(command.target).name == Path(path).name
    argv = command.argv if runs_main else tuple(argv)  # as started: the script may have changed sys.argv since
    return Command(flags=command.flags, kind="script", target=str(Path(path).absolute()), argv=_join_hydra_job(argv))


def _join_hydra_job(argv: tuple[str, ...]) -> tuple[str, ...]:
    """Return the arguments with the output folder of the hydra job that this process runs.

    Hydra names a folder after the current second, so that each rank would create another one.  In a sweep the ranks
    run all jobs, because this process ends after the first one.
    """
    module = sys.modules.get("hydra.core.hydra_config")
    if module is None or not module.HydraConfig.initialized():
        return argv
    job = module.HydraConfig.get()
    mode = job.get("mode")  # since hydra 1.2
    if mode is not None and mode.name == "MULTIRUN":
        return (*argv, _hydra_value("sweep.dir", Path(job.runtime.cwd, job.sweep.dir)))
    # Without the subfolder of the configuration, which each rank would write.
    return (*argv, _hydra_value("run.dir", job.runtime.output_dir), "hydra.output_subdir=null")


def _hydra_value(name: str, value: object) -> str:
    text = str(value).replace('"', '\\"')
    return f'hydra.{name}="{text}"'


def _split_options(letters: str) -> tuple[str, str, str]:
    """Split ``uWerror`` into the options without a value, the option with a value, and the value."""
    for position, letter in enumerate(letters):
        if letter in "cmWX":
            return _repeatable(letters[:position]), letter, letters[position + 1 :]
    return _repeatable(letters), "", ""


def _repeatable(letters: str) -> str:
    """Drop the options that make no sense for a rank: ``-i`` (interactive) and ``-x`` (skip the first line)."""
    return letters.replace("i", "").replace("x", "")
